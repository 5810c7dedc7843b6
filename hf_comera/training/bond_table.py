"""``BondTable``: the rank gates of all layers side by side, so that sizes and pushes cost a few operations a step."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_comera.modules import TensorTrainModule

__all__ = ["BondTable", "gated_layers"]

# Shapes here: G = gates of the whole model, B = inner bonds, C = cores, R = largest rank.


def gated_layers(model: nn.Module) -> dict[str, TensorTrainModule]:
    """The layers by name whose ranks are being trained: those with gates that require a gradient and have entries."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TensorTrainModule) and any(gate.requires_grad for gate in module.rank_gates())
    }


@dataclass(frozen=True)
class BondTable:
    """Where every gate of a model sits, as index tensors on the device of the gates; valid until ranks are cut.

    A *norm* is one number per bond (live gates, or their absolute sum), with a one appended that stands for the outer
    bonds of all layers, which have rank 1.
    """

    layers: dict[str, TensorTrainModule]
    gates: list[Tensor]
    """The parameters, layer by layer, bond by bond."""
    bond_of_gate: Tensor
    """``(G,)``."""
    slots: Tensor
    """``(B, R)``: places of a bond's gates among all; G where there is none."""
    factors: Tensor
    """``(C,)``: middle axes of each core, multiplied."""
    bonds_before: Tensor
    """``(C,)``: the bond before each core; B for an outer one."""
    bonds_behind: Tensor
    """``(C,)``: the bond behind each core; B for an outer one."""
    core_before: Tensor
    """``(B,)``: the core before each bond; the next one is behind it."""

    @classmethod
    def of(cls, model: nn.Module) -> "BondTable":
        """The table of all layers of ``model`` whose ranks are being trained."""
        layers = gated_layers(model)
        gates = [gate for module in layers.values() for gate in module.rank_gates()]
        device = gates[0].device if gates else torch.device("cpu")
        ranks = [gate.numel() for gate in gates]
        starts = torch.tensor([0, *ranks[:-1]] if ranks else []).cumsum(0)
        columns = torch.arange(max(ranks, default=0))
        counts = torch.tensor(ranks, dtype=torch.long).unsqueeze(1)
        slots = torch.where(columns < counts, starts.unsqueeze(1) + columns, sum(ranks))
        cores = _core_places(layers, len(gates))
        factors, before, behind, core_before = (torch.tensor(column, device=device) for column in cores)
        return cls(
            layers=layers,
            gates=gates,
            bond_of_gate=torch.repeat_interleave(torch.arange(len(ranks)), counts.flatten()).to(device),
            slots=slots.to(device),
            factors=factors.double(),
            bonds_before=before.long(),
            bonds_behind=behind.long(),
            core_before=core_before.long(),
        )

    @property
    def num_gates(self) -> int:
        """G."""
        return len(self.bond_of_gate)

    def flat(self, tensors: list[Tensor] | None = None) -> Tensor:
        """The gates (or tensors of their shapes) in one float32 vector ``(G,)``."""
        return torch.cat([tensor.detach().float() for tensor in (self.gates if tensors is None else tensors)])

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parts of ``(G,)`` that belong to each bond."""
        return list(flat.split([gate.numel() for gate in self.gates]))

    def norms(self, values: Tensor) -> Tensor:
        """Sums of ``values`` ``(G,)`` over each bond, ``(B + 1,)`` with the one of the outer bonds, in float64."""
        padded = torch.cat([values.double(), values.new_zeros(1, dtype=torch.float64)])
        return torch.cat([padded[self.slots].sum(1), padded.new_ones(1)])

    def size(self, norms: Tensor) -> Tensor:
        """``sum over cores of n_k * norm_{k-1} * norm_k``: entries of all cores, or the relaxation of their number."""
        return (self.factors * norms[self.bonds_before] * norms[self.bonds_behind]).sum()

    def slopes(self, norms: Tensor) -> Tensor:
        """Derivative of :meth:`size` by the norm of each bond, ``(B,)``: what a rank of it costs."""
        before = self.factors * norms[self.bonds_before]
        behind = self.factors * norms[self.bonds_behind]
        return before[self.core_before] + behind[self.core_before + 1]


def _core_places(layers: dict[str, TensorTrainModule], num_bonds: int) -> tuple[list[int], ...]:
    """Factor, bond before and bond behind of each core, and the core before each bond."""
    factors: list[int] = []
    before: list[int] = []
    behind: list[int] = []
    core_before: list[int] = []
    for module in layers.values():
        for place, core in enumerate(module.cores()):
            bond = len(core_before)
            factors.append(core.shape[1:-1].numel())
            before.append(bond - 1 if place > 0 else num_bonds)
            behind.append(bond if place < module.num_cores - 1 else num_bonds)
            if place < module.num_cores - 1:
                core_before.append(len(factors) - 1)
    return factors, before, behind, core_before
