"""One process of a data-parallel run: trains on its half of each batch and prints the losses as JSON.

Started as by ``torchrun``, or alone as the reference with whole batches, from test_data_parallel.py.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_comera import CoatAdamW, ComeraConfig, TTMuon, comera_param_groups, get_comera_model
from tests.architectures import ARCHITECTURES
from tests.integration.worker_process import run_worker

STEPS, BATCH = 4, 4
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(comera_param_groups(model, lr=0.1, weight_decay=0.0)),
    "coat": lambda model: CoatAdamW(comera_param_groups(model, lr=1e-3)),
    "tt_muon": lambda model: TTMuon(model, lr=1e-3),
}


def batches():
    """The same whole batches in every process, and the same sequences in every batch, so that the loss must fall."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, 241, (BATCH, 9), generator=generator)] * STEPS


def main():
    """Train and print."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    architecture = ARCHITECTURES["gpt2"]
    torch.manual_seed(0)
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    wrapped = DistributedDataParallel(model) if world > 1 else model
    optimizer = OPTIMIZERS[sys.argv[1]](model)
    losses = []
    for ids in batches():
        part = ids.chunk(world)[rank]
        loss = wrapped(input_ids=part, labels=part).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    if rank == 0:
        print(
            "RESULT", json.dumps({"losses": losses, "sum": sum(p.double().sum().item() for p in model.parameters())})
        )


if __name__ == "__main__":
    run_worker(main)
