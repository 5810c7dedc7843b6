"""The importance of each rank: a table of all bonds of a model, and the objective that presses on gates.

Source: CoMERA, arXiv:2405.14377, rank-adaptive training; papers on proximal steps for the l1 norm: Daubechies,
Defrise, De Mol, "An iterative thresholding algorithm for linear inverse problems with a sparsity constraint", 2004.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_comera.modules import TensorTrainModule

__all__ = [
    "BondTable",
    "bond_effects",
    "exact_size",
    "gated_layers",
    "late_weight",
    "rank_importance",
    "relative_push",
    "relaxed_size",
    "shrink",
]

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
    """Where every gate of a model sits, as index tensors on the device of the gates; valid until ranks are pruned.

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
        """Derivative of :meth:`size` by the norm of each bond, ``(B,)``: the cost of one of its ranks."""
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


def bond_effects(table: BondTable, gates: Tensor, gradients: Tensor) -> Tensor:
    """How much one step's loss depends on each bond: the sum of ``(d * dL/dd)^2`` over its gates d.

    ``d * dL/dd`` is the change of the loss, to first order, if that rank were left out. Its mean square over many
    steps is what the loss rises by, to second order, where gradients are noise (Fisher's information in place of the
    Hessian). It costs nothing: gates have their gradients anyway.

    Shape:
        gates and gradients ``(G,)`` -> ``(B,)`` in float64; gradients that are not finite count as zero.

    Source:
        Molchanov et al., "Importance estimation for neural network pruning", arXiv:1906.10771.
    """
    effects = (gates * gradients).square().nan_to_num(0.0, 0.0, 0.0)
    return table.norms(effects)[:-1]


def rank_importance(table: BondTable, effects: Tensor, spectra: list[Tensor], threshold: float) -> Tensor:
    """Importance of every rank, in units that are the same for all layers.

    The bonds must be in their canonical bases. There the ranks of a bond are orthogonal, so rank j is the part ``s_j^2
    / |s|^2`` of the squared norm of its layer's matrix. It has the same part of the dependence of the loss on the
    layer, which is the mean of the effects of its bonds.

    Args:
        table: Of the model.
        effects: Mean of :func:`bond_effects` over the last steps, ``(B,)``.
        spectra: Singular values of each bond, descending.
        threshold: A rank is dead if it and all weaker ones together, by the norm of their singular values, are no more
            than this part of the largest. So the change at a bond is bounded, however many ranks die.

    Returns:
        ``(G,)`` in float64, -1 for dead ranks.
    """
    effects = effects if effects.any() else torch.ones_like(effects)  # before the first step
    bonds = iter(range(len(spectra)))
    values = []
    for module in table.layers.values():
        own = [next(bonds) for _ in module.rank_gates()]
        effect = effects[own].mean()
        for bond in own:
            squares = spectra[bond].square()
            share = squares / squares.sum().clamp_min(torch.finfo(torch.float64).tiny)
            tails = squares.flip(0).cumsum(0).flip(0).sqrt()
            dead = tails <= threshold * spectra[bond][0]
            values.append(torch.where(dead, -1.0, share * effect))
    return torch.cat(values)


def relaxed_size(table: BondTable, gates: Tensor) -> Tensor:
    """``S_hat = sum over cores of n_k |d_{k-1}|_1 |d_k|_1``, a scalar in float64.

    Args:
        table: Of the model.
        gates: All gates, ``(G,)``.
    """
    return table.size(table.norms(gates.abs()))


def exact_size(table: BondTable, gates: Tensor) -> Tensor:
    """``S``: the same with the number of gates that are not zero; entries of all cores once those ranks are pruned."""
    return table.size(table.norms((gates != 0).float()))


def relative_push(table: BondTable, gates: Tensor) -> Tensor:
    """Derivative of ``S_hat`` by the size of every gate, divided by its mean over the live gates.

    Dividing ``S_hat`` by the dense size would leave a push that falls with the number of gates in the model, by
    factors of a hundred between models. This push is about 1 for every model.

    Shape:
        gates ``(G,) -> (G,)`` in float32.
    """
    push = table.slopes(table.norms(gates.abs()))[table.bond_of_gate]
    live = (gates != 0).double()
    return (push * live.sum() / (push * live).sum().clamp_min(1e-30)).float()


def shrink(gates: Tensor, amount: Tensor) -> Tensor:
    """The proximal step of a weighted l1 norm: every gate moves towards zero by ``amount``, and stops there.

    Shape:
        ``(G,), (G,) -> (G,)``.
    """
    return gates.sign() * (gates.abs() - amount).clamp_min(0)


def late_weight(loss: Tensor, size: Tensor, wanted_loss: Tensor, wanted_size: Tensor | float, rho: float) -> Tensor:
    """Weight of the size objective under achievement scalarisation, a scalar on the device of ``loss``.

    ``max{(L - L0) / L0, (S - S0) / S0} + rho (L / L0 + S_hat / S0)``: where the size is the worse of the two its
    weight is ``1 + rho``, elsewhere ``rho``. The weight of the loss is not needed, since steps of TTMuon and AdamW do
    not depend on the scale of the gradient. On the gates only the ratio of both counts, and elsewhere nothing does.

    Args:
        loss: Smoothed loss L.
        size: Exact size S.
        wanted_loss: L0.
        wanted_size: S0.
        rho: Weight of the objective that is not the worse one.
    """
    excess_of_loss = (loss - wanted_loss) / abs(wanted_loss)
    excess_of_size = (size - wanted_size) / wanted_size
    return torch.where(excess_of_loss < excess_of_size, 1 + rho, rho).float()
