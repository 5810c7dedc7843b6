"""The size side of rank-adaptive training: relaxed and exact size, the push on gates, the blend of two objectives.

Source: CoMERA, arXiv:2405.14377, rank-adaptive training; papers on proximal steps for the l1 norm: Daubechies,
Defrise, De Mol, "An iterative thresholding algorithm for linear inverse problems with a sparsity constraint", 2004.
"""

import torch
from torch import Tensor

from hf_comera.training.bond_table import BondTable

__all__ = ["exact_size", "late_weight", "relative_push", "relaxed_size", "shrink"]


def relaxed_size(table: BondTable, gates: Tensor) -> Tensor:
    """``S_hat = sum over cores of n_k |d_{k-1}|_1 |d_k|_1``, a scalar in float64.

    Args:
        table: Of the model.
        gates: All gates, ``(G,)``.
    """
    return table.size(table.norms(gates.abs()))


def exact_size(table: BondTable, gates: Tensor) -> Tensor:
    """``S``: the same with the number of gates that are not zero; entries of all cores once those ranks are cut."""
    return table.size(table.norms((gates != 0).float()))


def relative_push(table: BondTable, gates: Tensor) -> Tensor:
    """Derivative of ``S_hat`` by the size of every gate, divided by its mean over the live gates.

    Dividing ``S_hat`` by the dense size would leave a push that falls with the number of gates in the model, by
    factors of a hundred between models; this one is about 1 for every model.

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


def late_weight(
    loss: Tensor, size: Tensor, wanted_loss: Tensor | float, wanted_size: Tensor | float, rho: float
) -> Tensor:
    """Weight of the size objective under achievement scalarisation, a scalar on the device of ``loss``.

    ``max{(L - L0) / L0, (S - S0) / S0} + rho (L / L0 + S_hat / S0)``: where the size is the worse of the two its
    weight is ``1 + rho``, elsewhere ``rho``. The weight of the loss is not needed: steps of TTMuon and AdamW do not
    depend on the scale of the gradient, so on the gates only the ratio of both counts, and elsewhere nothing does.

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
