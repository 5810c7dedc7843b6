"""One process of a data-parallel run under activation policies: trains on its part, prints losses and weights.

Started as by ``torchrun`` from tests/integration/test_policy_in_parallel.py.
"""

import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_comera import ComeraConfig, get_comera_model, set_activation_policy
from hf_comera.memory import ActivationPolicy, SavedBytes
from tests.architectures import ARCHITECTURES
from tests.integration.worker_process import run_worker

STEPS, BATCH = 3, 4
WAYS = ("replicas", "static replicas", "shards")
POLICIES = {
    "none": None,
    "rank": ActivationPolicy(),
    "recompute": ActivationPolicy(attention="recompute"),
}


def new_model():
    """The same in every process."""
    architecture = ARCHITECTURES["gpt2"]
    torch.manual_seed(0)
    return get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).train()


def sharded(model):
    """Layer by layer, then the rest."""
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    return model


def train(way, policy):
    """Losses of each step, bytes saved in the last one, and the sum of all weights."""
    model = new_model()
    set_activation_policy(model, POLICIES[policy])
    wrapped = (
        sharded(model) if way == "shards" else DistributedDataParallel(model, static_graph=way == "static replicas")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    ids, losses = torch.randint(2, 241, (BATCH, 9)), []
    for _ in range(STEPS):
        with SavedBytes() as saved:
            loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
    return {"losses": losses, "bytes": saved.total, "sum": sum(weight.double().sum().item() for weight in weights)}


def main():
    """Train and print."""
    for way in WAYS:
        for policy in POLICIES:
            result = train(way, policy)
            if dist.get_rank() == 0:
                print("RESULT", json.dumps([way, policy, result]))


if __name__ == "__main__":
    run_worker(main)
