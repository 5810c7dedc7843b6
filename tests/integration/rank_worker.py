"""One process of a data-parallel run that trains ranks; writes losses, ranks and sizes as JSON into a folder.

Started as by ``torchrun`` (or alone, as the reference with whole batches) from test_ranks_in_parallel.py, with the way
to train, ``loop`` (DDP by hand, with a stop and a resumption on the way), ``loop-adamw`` or ``trainer``, and the
folder.
"""

import copy
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from hf_comera import (
    ComeraConfig,
    ComeraTrainer,
    RankAdaptation,
    RankAdapter,
    TTMuon,
    add_rank_gates,
    comera_param_groups,
    get_comera_model,
    size_report,
)
from tests.architectures import ARCHITECTURES
from tests.integration.worker_process import run_worker

STEPS, BATCH = 8, 4
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def compressed():
    """The same small model everywhere, without dropout."""
    torch.manual_seed(0)
    architecture = ARCHITECTURES["gpt2"]
    config = architecture.new_config()
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return get_comera_model(architecture.auto_class, ComeraConfig(rank=6), config=config)


def adaptation(model):
    """Down to a third of the cores, by way of removed layers."""
    report = size_report(model)
    wanted = int(report.parameters - 0.67 * report.compressed_parameters)
    return RankAdaptation(target_parameters=wanted, min_rank=0, early=1, late=5, cut_every=1)


def sequences():
    """The same whole batch in every step and process, so that the loss must fall."""
    return torch.randint(2, 241, (BATCH, 9), generator=torch.Generator().manual_seed(5))


def start():
    """Model, what is called, optimizer and adapter."""
    model = compressed()
    settings = adaptation(model)
    add_rank_gates(model)
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = TTMuon(model, 1e-3)
    if sys.argv[1] == "loop-adamw":  # with a large eps: entries of gradients that are all rounding must not decide
        optimizer = torch.optim.AdamW(comera_param_groups(model, 1e-3), eps=1e-4, fused=True)
    return model, wrapped, optimizer, RankAdapter(wrapped, optimizer, settings, total_steps=STEPS)


def steps(wrapped, optimizer, adapter, count):
    """Train; returns the losses of the whole batches."""
    losses = []
    part = sequences().chunk(WORLD)[RANK]
    for _ in range(count):
        loss = wrapped(input_ids=part, labels=part).loss
        loss.backward()
        adapter.before_step(loss)
        optimizer.step()
        adapter.after_step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if WORLD > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / WORLD)
    return losses


def loop():
    """Half of the steps, then the rest in new objects that were loaded from the state of the first."""
    model, wrapped, optimizer, adapter = start()
    losses = steps(wrapped, optimizer, adapter, STEPS // 2)
    states = [copy.deepcopy(thing.state_dict()) for thing in (model, optimizer, adapter)]
    model, wrapped, optimizer, adapter = start()
    for thing, state in zip((model, optimizer, adapter), states, strict=True):
        thing.load_state_dict(state)
    losses += steps(wrapped, optimizer, adapter, STEPS - STEPS // 2)
    adapter.finish()
    return model, losses


class InOrder(ComeraTrainer):
    """Sees the rows in their order."""

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trainer():
    """``ComeraTrainer``; both processes see the two halves of each batch in turns."""
    model = compressed()
    rows = [{"input_ids": row, "labels": row} for row in sequences()] * STEPS
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=BATCH // WORLD, max_steps=STEPS, logging_steps=1,
            learning_rate=1e-3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
            dataloader_pin_memory=False, ddp_backend="gloo" if WORLD > 1 else None,
        )  # fmt: skip
        run = InOrder(model=model, args=args, train_dataset=rows, rank_adaptation=adaptation(model))
        run.train()
    return model, [log["loss"] for log in run.state.log_history if "loss" in log]


def main():
    """Train and write."""
    model, losses = (trainer if sys.argv[1] == "trainer" else loop)()
    ranks = {name: list(after) for name, after in model.rank_report().after.items()}
    size, wanted = size_report(model).parameters, adaptation(compressed()).target_parameters
    dense = model.merge_and_unload()  # cores of equal trains may differ in signs
    total = sum(p.double().abs().sum().item() for p in dense.parameters())
    result = {"losses": losses, "sum": total, "ranks": ranks, "size": size, "wanted": wanted}
    Path(sys.argv[2], f"{RANK}.json").write_text(json.dumps(result))  # lines that two processes print can mix


if __name__ == "__main__":
    run_worker(main, join=sys.argv[1] != "trainer")
