"""One process of a sharded run with CoatAdamW: saves its state as sharded and whole, and goes on from a saved one.

Started as by ``torchrun``, with any number of processes, from tests/integration/test_sharded_moments.py.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_comera import CoatAdamW, ComeraConfig, get_comera_model
from hf_comera.modules import TensorTrainModule
from tests.architectures import ARCHITECTURES
from tests.integration.worker_process import run_worker

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
STEPS = 3


def new_network():
    """Rows of 200 and 20 entries, an odd number of rows, and one row for two processes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 33), nn.GELU(), nn.Linear(33, 20), nn.GELU(), nn.Linear(20, 1))


def new_compressed():
    """Cores of all shapes and rank gates, besides what a GPT-2 has."""
    torch.manual_seed(0)
    architecture = ARCHITECTURES["gpt2"]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=12), config=architecture.new_config()).eval()
    for module in model.modules():
        if isinstance(module, TensorTrainModule):
            module.add_rank_gates()
    return model


MODELS = {"network": new_network, "compressed": new_compressed}


def loss_of(model, step):
    """Of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    if isinstance(model, nn.Sequential):
        inputs = torch.randn(8, 200, generator=generator)
        return (model(inputs) - inputs[:, :1].sin()).square().mean()
    ids = torch.randint(2, 200, (4, 9), generator=generator)
    return model(input_ids=ids, labels=ids).loss


def train(model, optimizer, start):
    """The same whole batch in every process, so that all gradients are those of one process."""
    for step in range(start, start + STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def load(model, optimizer, folder):
    """What any number of processes saved, into any number."""
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder / "sharded")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def main():
    """Train, or load and train; then save."""
    kind, target, source = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None
    model = fully_shard(MODELS[kind](), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = CoatAdamW(model.parameters(), lr=1e-2)
    if source is not None:
        load(model, optimizer, source)
    else:
        train(model, optimizer, 0)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=target / "sharded")
    whole = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=WHOLE))
    train(model, optimizer, STEPS)
    after = get_model_state_dict(model, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save({"optimizer": whole, "after": after}, target / "whole.pt")


if __name__ == "__main__":
    run_worker(main)
