"""Put rank gates on a model before its ranks are trained, find them in an optimizer, and fold them afterwards."""

import gc
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_comera.modules import TensorTrainModule
from hf_comera.optim.param_groups import check_whole, tensor_train_modules
from hf_comera.training.ranks.importance import gated_layers

__all__ = ["add_rank_gates", "bare_model", "check_gates", "find_ddp", "fold_rank_gates", "gate_rate", "rewrap"]

_DDP_SETTINGS = (
    "device_ids", "output_device", "dim", "process_group", "find_unused_parameters", "gradient_as_bucket_view",
    "static_graph", "mixed_precision", "forward_sync_buffers",
)  # fmt: skip
_WRAPPER_STATE = ("training", "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
                  "_forward_pre_hooks_with_kwargs", "_backward_hooks", "require_backward_grad_sync")  # fmt: skip


def add_rank_gates(model: nn.Module) -> None:
    """Give every tensor-train layer of ``model`` rank gates of ones, unless it has them; nothing computed changes.

    Make the optimizer after this. Layers with a frozen core stay without.

    Raises:
        ValueError: If the model has no layer in tensor-train form with ranks to train.
    """
    layers = [module for module in model.modules() if isinstance(module, TensorTrainModule)]
    adaptable = [
        module
        for module in layers
        if module.num_cores > 1 and not module.is_removed and all(core.requires_grad for core in module.cores())
    ]
    if not adaptable:
        if layers and all(module.is_removed for module in layers):
            raise ValueError(
                f"All {len(layers)} tensor-train layers of {type(model).__name__} have been removed: no rank is left "
                "to train. Train on without rank adaptation."
            )
        found = "no layer in tensor-train form" if not layers else "no such layer with ranks and trainable cores"
        raise ValueError(
            f"Rank adaptation needs a compressed model, but {type(model).__name__} has {found}. Make it with "
            "get_comera_model(model, ComeraConfig(rank=30)), and unfreeze the cores."
        )
    for module in adaptable:
        if not module.rank_gates():
            module.add_rank_gates()


def check_gates(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model without gates or with a core frozen since, and an optimizer that cannot train gates and cores.

    Raises:
        ValueError: If one of these is the case: the optimizer lacks a gate or a core, decays gates, or has several
            rates for them.
    """
    layers = gated_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no trainable rank gates. Call hf_comera.add_rank_gates(model) before making "
            "the optimizer."
        )
    check_whole(tensor_train_modules(model))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    rates: dict[float, str] = {}
    for name, module in layers.items():
        for place, core in enumerate(module.cores()):
            _check_core(f"{name}.core_{place}", core, groups)
        for place, gate in enumerate(module.rank_gates()):
            rate = _check_gate(f"{name}.rank_gate_{place}", gate, groups)
            rates.setdefault(rate, f"{name}.rank_gate_{place}")
    if len(rates) > 1:
        found = ", ".join(f"{name} {rate:g}" for rate, name in rates.items())
        raise ValueError(
            f"Rank gates have several learning rates ({found}), but sizes are weighed against each other at one. Put "
            "all gates into one parameter group, as TTMuon(model) and comera_param_groups(model, lr=1e-3) do."
        )


def _check_core(name: str, core: torch.Tensor, groups: Mapping[int, dict[str, Any]]) -> None:
    """The bases of its bonds will change, and its moments with them."""
    if not core.requires_grad:
        raise ValueError(
            f"{name} is frozen, but its layer has trainable rank gates: with its ranks it would change. Freeze before "
            "add_rank_gates(model), which leaves such layers out, or unfreeze it: requires_grad_(True)."
        )
    if id(core) not in groups:
        raise ValueError(
            f"The optimizer does not hold {name}, whose moments have to follow when ranks are pruned. Put gates and "
            "cores into one optimizer, for example TTMuon(model) or AdamW(comera_param_groups(model, lr=1e-3))."
        )


def _check_gate(name: str, gate: torch.Tensor, groups: Mapping[int, dict[str, Any]]) -> float:
    """Its learning rate, if it can be trained."""
    if gate.device.type == "mps":
        raise ValueError(f"{name} is on MPS, which has no float64. Use a CPU or a CUDA GPU.")
    group = groups.get(id(gate))
    if group is None:
        raise ValueError(
            f"The optimizer does not hold {name}. Make it after the gates: add_rank_gates(model), then TTMuon(model) "
            "or AdamW(comera_param_groups(model, lr=1e-3))."
        )
    if group.get("weight_decay"):
        raise ValueError(
            f"The optimizer decays {name} (weight_decay={group['weight_decay']}), which removes ranks for no reason. "
            "Use TTMuon(model) or AdamW(comera_param_groups(model, lr=1e-3))."
        )
    return float(group["lr"])


def gate_rate(optimizer: torch.optim.Optimizer, gate: torch.Tensor) -> float:
    """The learning rate that ``gate`` has now."""
    return next(group["lr"] for group in optimizer.param_groups if any(p is gate for p in group["params"]))


def fold_rank_gates(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Multiply all gates into the cores and take them out of model and optimizer."""
    gates = set()
    for module in model.modules():
        if isinstance(module, TensorTrainModule):
            gates |= {id(gate) for gate in module.rank_gates()}
            module.fold_rank_gates()
    for group in [] if optimizer is None else optimizer.param_groups:
        stays = [id(parameter) not in gates for parameter in group["params"]]
        for parameter, kept in zip(group["params"], stays, strict=True):
            if not kept and optimizer is not None:
                optimizer.state.pop(parameter, None)
        for key in ("params", "names", "param_names"):
            if key in group:
                group[key] = [item for item, kept in zip(group[key], stays, strict=True) if kept]


def bare_model(model: nn.Module) -> nn.Module:
    """The model inside DDP and ``torch.compile``.

    Raises:
        ValueError: If it is spread over GPUs by one process (``nn.DataParallel``).
    """
    if any(isinstance(part, nn.DataParallel) for part in model.modules()):
        raise ValueError(
            "The model is in nn.DataParallel, whose copies would keep ranks that have been pruned. Start one process "
            "a GPU (accelerate launch or torchrun), where DistributedDataParallel holds it."
        )
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model.get_submodule("_orig_mod")
    return model


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP around the model; ``torch.compile`` may be around that."""
    return next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)


def rewrap(ddp: DistributedDataParallel | None) -> None:
    """Let DDP find the parameters again, in place: training loops hold on to the object. Its settings stay."""
    if ddp is None:
        return
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    settings = {name: getattr(ddp, name) for name in _DDP_SETTINGS if name in known and hasattr(ddp, name)}
    if "forward_sync_buffers" not in known:  # as torch calls it from 2.13 on
        settings["broadcast_buffers"] = ddp.broadcast_buffers
    if "bucket_cap_mb" in known and hasattr(ddp, "bucket_bytes_cap"):
        settings["bucket_cap_mb"] = ddp.bucket_bytes_cap / 2**20
    module, hooks = ddp.module, list(getattr(ddp, "_comm_hooks", ()))
    kept = {name: ddp.__dict__[name] for name in _WRAPPER_STATE if name in ddp.__dict__}
    if any(isinstance(part, TensorTrainModule) and part.is_removed for part in module.modules()):
        settings["find_unused_parameters"] = True  # say a norm that nothing but removed layers read
    del ddp.reducer  # its hooks hold the old parameters
    gc.collect()
    DistributedDataParallel.__init__(ddp, module, **settings)
    ddp.__dict__.update(kept)
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
