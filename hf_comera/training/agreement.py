"""The bases and the choice of ranks of the first process, in every process of a data-parallel training."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_comera.modules import TensorTrainModule

__all__ = ["agree_on_bases", "agreed"]


def agree_on_bases(
    ddp: DistributedDataParallel | None,
    layers: Mapping[str, TensorTrainModule],
    optimizer: torch.optim.Optimizer,
    spectra: list[Tensor],
) -> None:
    """Cores and moments of the first process everywhere: signs and orders of singular vectors are arbitrary."""
    if ddp is None:
        return
    for module in layers.values():
        for core in module.cores():
            moments = [value for value in optimizer.state.get(core, {}).values() if isinstance(value, Tensor)]
            for tensor in (core.data, *(value for value in moments if value.device == core.device)):
                dist.broadcast(tensor, group_src=0, group=ddp.process_group)
    for values in spectra:
        dist.broadcast(values, group_src=0, group=ddp.process_group)


def agreed(ddp: DistributedDataParallel | None, chosen: list[Tensor]) -> list[Tensor]:
    """The choice of the first process, everywhere."""
    if ddp is not None:
        box = [chosen]
        dist.broadcast_object_list(box, group_src=0, group=ddp.process_group)
        chosen = box[0]
    return chosen
