"""Decomposition in the metric of the outputs: errors of a layer count as its inputs make them count.

A layer computes ``y = x M``. What matters of an approximation ``M'`` is the squared error of its outputs,
``E |x (M - M')|^2 = trace(D^T C D)`` with ``D = M - M'`` and the second moment ``C = E[x^T x]`` of the inputs. The
plain norm of D, which TT-SVD minimises, says little about it: directions that inputs never take count as much there
as those they always take.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_comera.tt.cores import contract_left, contract_right
from hf_comera.tt.decomposition import balance, tt_svd

__all__ = ["OutputSpectrum", "refine_cores", "weighted_error", "weighted_tt"]

REFINEMENT_STEPS = 30
HISTORY = 10
"""Pairs that L-BFGS keeps; more than about ten have never helped here."""


class OutputSpectrum:
    """Principal directions of a layer's outputs, from which the best two factors of every rank follow.

    The best ``M'`` of rank r projects the outputs on their r leading principal directions ``U``: its factors are
    ``M U`` and ``U^T``, and its squared error is the energy of the other directions. No inverse of C is needed, so
    inputs that never occur do no harm.

    Args:
        matrix: The dense matrix, any floating dtype.
        second_moment: ``E[x^T x]`` of its inputs, symmetric and positive semidefinite.

    Shape:
        ``matrix (in, out)``, ``second_moment (in, in)``.

    Source:
        Yuan et al., ASVD, arXiv:2312.05821, and Wang et al., SVD-LLM, arXiv:2403.07378, for the objective; by the
        eigenvectors of the outputs' second moment: Swift-SVD, arXiv:2604.01609.
    """

    def __init__(self, matrix: Tensor, second_moment: Tensor) -> None:
        self.matrix = matrix.detach().double()
        moment = second_moment.to(self.matrix)
        energies, self.directions = _principal_directions(self.matrix, moment)
        self.energies = energies.clamp_min(0.0)
        """Energy of the outputs along each direction, ``(min(in, out),)``, descending; float64."""

    def squared_error(self, rank: int) -> float:
        """``trace(D^T C D)`` of the best two factors of ``rank``."""
        return self.energies[rank:].sum().item()

    def relative_error(self, rank: int) -> float:
        """Root of the squared error over the energy of all outputs; 0 for a layer without outputs."""
        total = self.energies.sum().item()
        return (self.squared_error(rank) / total) ** 0.5 if total else 0.0

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """The best two factors: ``(in, rank)``, and ``(rank, out)`` with orthonormal rows; float64."""
        basis = self.directions[:, :rank]
        return self.matrix @ basis, basis.T.contiguous()


def weighted_error(approximation: Tensor, matrix: Tensor, second_moment: Tensor) -> float:
    """Relative error of the outputs, ``sqrt(trace(D^T C D) / trace(M^T C M))`` with ``D = M - M'``, in float64.

    Shape:
        ``approximation, matrix (in, out)``, ``second_moment (in, in)``.
    """
    matrix = matrix.double()
    moment = second_moment.to(matrix)
    difference = approximation.double() - matrix
    energy = (matrix * (moment @ matrix)).sum().item()
    squared = (difference * (moment @ difference)).sum().clamp_min(0).item()
    return (squared / energy) ** 0.5 if energy > 0 else squared**0.5


def weighted_tt(
    spectrum: OutputSpectrum,
    second_moment: Tensor,
    in_factors: Sequence[int],
    out_factors: Sequence[int],
    ranks: Sequence[int],
    steps: int = REFINEMENT_STEPS,
) -> list[Tensor]:
    """Cores of a TT linear with a small error of the outputs.

    With one factor a side this is the optimum. Else the optimum of the middle bond is split by TT-SVD, which loses
    much of the gain again, and the cores are then refined together.

    Args:
        spectrum: Of the layer.
        second_moment: ``(in, in)``, as the spectrum had.
        in_factors: Factors of the rows; a larger product means padding with zero rows.
        out_factors: Factors of the columns, likewise.
        ranks: One rank per inner bond, none above its useful maximum.
        steps: Iterations of the refinement.

    Returns:
        Cores ``(r_{k-1}, n_k, r_k)`` in float32, all of the same norm per entry.
    """
    left, right = spectrum.factors(ranks[len(in_factors) - 1])
    if len(in_factors) == len(out_factors) == 1:
        return [core.float() for core in balance([left[None], right[:, :, None]])]
    cores = tt_svd(left @ right, in_factors, out_factors, ranks)
    cores = refine_cores(cores, len(in_factors), spectrum.matrix, second_moment, steps)
    return [core.float() for core in balance(cores)]


def refine_cores(
    cores: Sequence[Tensor], num_left: int, matrix: Tensor, second_moment: Tensor, steps: int = REFINEMENT_STEPS
) -> list[Tensor]:
    """Lower the error of the outputs over all cores together, by L-BFGS; no data is needed.

    With halves A and B the squared error is ``trace(M^T C M) - 2 trace(B M^T C A) + trace(B^T A^T C A B)``. Products
    are as wide as the middle rank only.

    Args:
        cores: Where to start; cores may stand for zero rows and columns beyond those of ``matrix``.
        num_left: Cores of the rows.
        matrix: The dense matrix.
        second_moment: Of its inputs.
        steps: Iterations.

    Shape:
        ``matrix (in, out)``, ``second_moment (in, in)``.

    Returns:
        Cores of the same shapes in float64; their error is never above that of ``cores``.
    """
    matrix = matrix.detach().double()
    moment = second_moment.to(matrix)
    target = moment @ matrix
    energy = (matrix * target).sum()
    start = [core.detach().double().contiguous() for core in cores]
    if energy <= 0:
        return start
    trained = [core.clone().requires_grad_() for core in start]

    def loss() -> Tensor:
        left = contract_left(trained[:num_left])[-1][: matrix.shape[0]]
        right = contract_right(trained[num_left:])[0][:, : matrix.shape[1]]
        shared = ((left.T @ target) * right).sum()
        own = ((left.T @ (moment @ left)) * (right @ right.T)).sum()
        return (energy - 2 * shared + own) / energy

    optimizer = torch.optim.LBFGS(trained, max_iter=steps, history_size=HISTORY, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.item()

    with torch.enable_grad():
        before = loss().item()
        optimizer.step(closure)
        after = loss().item()
    return [core.detach() for core in trained] if after <= before else start


def _principal_directions(matrix: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors of ``matrix^T moment matrix``, from the smaller of two problems."""
    rows, columns = matrix.shape
    if columns <= rows:
        energies, directions = torch.linalg.eigh(matrix.T @ moment @ matrix)
        return energies.flip(0), directions.flip(1)
    values, vectors = torch.linalg.eigh(moment)
    weighted = (vectors * values.clamp_min(0).sqrt()).T @ matrix  # its Gram matrix is the outputs' second moment
    energies, rotation = torch.linalg.eigh(weighted @ weighted.T)
    directions = torch.linalg.qr(weighted.T @ rotation.flip(1)).Q
    return energies.flip(0), directions
