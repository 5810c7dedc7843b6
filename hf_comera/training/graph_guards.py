"""What cannot be trained with CUDA graphs is refused, with what to do instead."""

from typing import Any

import torch
from torch import nn

from hf_comera.training.rank_adapter import RankAdapter
from hf_comera.training.rank_gates import find_ddp

__all__ = ["check_graphable", "check_number", "check_trainer_graphs"]


def check_graphable(model: nn.Module, optimizer: torch.optim.Optimizer, adapter: RankAdapter | None) -> None:
    """Refuse what :class:`GraphedStep` cannot train rightly.

    Raises:
        ValueError: If the model is spread over processes, the optimizer accumulates gradients or scales losses, or
            the adapter is of another optimizer.
    """
    spread = _spread_over(model)
    if spread is not None:
        raise ValueError(
            f"The model is in {spread}, whose communication GraphedStep does not record. Pass the bare model in a "
            "single process, or train without GraphedStep."
        )
    if getattr(optimizer, "scaler", None) is not None:
        raise ValueError(
            "The optimizer scales losses for fp16 (mixed_precision='fp16') and asks on the host whether a step "
            "counts, which a CUDA graph cannot. Use mixed_precision='bf16'."
        )
    steps = getattr(getattr(optimizer, "gradient_state", None), "num_steps", 1)
    if steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={steps} is set in the Accelerator, but a call of GraphedStep is a whole "
            f"step. Use gradient_accumulation_steps=1 and batches {steps} times as large."
        )
    inner = getattr(optimizer, "optimizer", optimizer)
    if adapter is not None and adapter.optimizer is not inner:
        raise ValueError(
            f"adapter is of another optimizer ({type(adapter.optimizer).__name__}) than the one given "
            f"({type(inner).__name__}). Make it of the same: RankAdapter(model, optimizer, ...)."
        )


def check_number(name: str, value: float | None, *, example: float) -> None:
    """Refuse a setting that is not positive, nor None.

    Raises:
        ValueError: If it is neither.
    """
    wanted = int if isinstance(example, int) else int | float
    if value is not None and (isinstance(value, bool) or not isinstance(value, wanted) or not value > 0):
        raise ValueError(f"{name}={value!r} is needed as a positive number, for example {name}={example}.")


def check_trainer_graphs(args: Any, cuda_graphs: bool, padding_buckets: Any) -> None:
    """Refuse training arguments with which a Trainer cannot use CUDA graphs.

    Raises:
        ValueError: If there is such an argument, or there are buckets without graphs.
    """
    if not cuda_graphs:
        if padding_buckets is not None:
            raise ValueError(
                f"padding_buckets={padding_buckets!r} is only for CUDA graphs, and cuda_graphs={cuda_graphs}. Set "
                "cuda_graphs=True, or leave padding_buckets out."
            )
        return
    refused = {
        "gradient_accumulation_steps": (1, "Use 1, and a larger per_device_train_batch_size."),
        "fp16": (False, "Its scaler asks on the host whether a step counts. Use bf16=True."),
        "world_size": (1, "Communication is not recorded. Train in one process, or with cuda_graphs=False."),
        "fsdp": (None, "Communication is not recorded. Use cuda_graphs=False, or no FSDP."),
        "deepspeed": (None, "DeepSpeed steps by itself. Use cuda_graphs=False, or no DeepSpeed."),
        "torch_compile": (False, "It would record graphs of its own. Use one of both."),
    }
    for name, (wanted, advice) in refused.items():
        value = getattr(args, name, wanted)
        if value != wanted and value:
            raise ValueError(f"cuda_graphs=True does not work with {name}={value!r}, only with {wanted}. {advice}")
    if args.n_gpu > 1:
        raise ValueError(
            f"cuda_graphs=True needs one GPU, but this process would use {args.n_gpu} (DataParallel). Set "
            "CUDA_VISIBLE_DEVICES to one of them."
        )


def _spread_over(model: nn.Module) -> str | None:
    """The name of what spreads the model over processes, if anything does."""
    if find_ddp(model) is not None:
        return "DistributedDataParallel"
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        return "FSDP (its parameters are sharded)"
    names = {type(module).__name__ for module in (model, getattr(model, "module", model))}
    return next(iter(names & {"FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"}), None)
