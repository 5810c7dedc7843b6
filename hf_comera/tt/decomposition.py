"""From a dense matrix to tensor-train cores: TT-SVD with Gram matrices and a randomised range finder."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["balance", "low_rank_factors", "relative_error", "tt_svd", "ttm_svd"]

# Up to this many rows (or columns) a Gram matrix in float64 and its eigenvectors are cheaper than anything else.
GRAM_LIMIT = 768
OVERSAMPLING = 16
POWER_ITERATIONS = 3


@torch.no_grad()
def tt_svd(
    matrix: Tensor, in_factors: Sequence[int], out_factors: Sequence[int], ranks: Sequence[int]
) -> list[Tensor]:
    """Cores of ``matrix`` for a TT linear.

    Args:
        matrix: Dense ``(in, out)`` matrix (``nn.Linear.weight.T``), any floating dtype.
        in_factors: Factors of the rows; a larger product means padding with zero rows.
        out_factors: Factors of the columns, likewise.
        ranks: One rank per inner bond, none above its useful maximum.

    Returns:
        Cores ``(r_{k-1}, n_k, r_k)`` in float32 (float64 for a float64 matrix), all of the same norm per entry.

    Source:
        Oseledets, Tensor-Train Decomposition, SIAM J. Sci. Comput. 33 (2011), algorithm 1; range finder: Halko,
        Martinsson, Tropp, SIAM Review 53 (2011), algorithm 4.4.
    """
    padded = _pad(matrix, math.prod(in_factors), math.prod(out_factors))
    return _decompose(padded.reshape(-1), (*in_factors, *out_factors), ranks)


@torch.no_grad()
def ttm_svd(
    matrix: Tensor, in_factors: Sequence[int], out_factors: Sequence[int], ranks: Sequence[int]
) -> list[Tensor]:
    """Cores ``(r_{k-1}, v_k, h_k, r_k)`` of a ``(vocabulary, hidden)`` table; as :func:`tt_svd` otherwise."""
    padded = _pad(matrix, math.prod(in_factors), math.prod(out_factors)).reshape(*in_factors, *out_factors)
    order = len(in_factors)
    interleaved = padded.permute([axis for k in range(order) for axis in (k, order + k)])
    factors = [v * h for v, h in zip(in_factors, out_factors, strict=True)]
    cores = _decompose(interleaved.reshape(-1), factors, ranks)
    return [
        core.reshape(core.shape[0], v, h, core.shape[-1])
        for core, v, h in zip(cores, in_factors, out_factors, strict=True)
    ]


@torch.no_grad()
def low_rank_factors(matrix: Tensor, rank: int, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Two factors whose product is nearest to ``matrix``: each row's squared error counts by its weight.

    Rows are projected on the leading right singular vectors of ``sqrt(row_weights) * matrix``. That is best for each
    row whatever its weight, so rows of weight zero are approximated too.

    Args:
        matrix: Any floating dtype.
        rank: Columns of the first factor, at most those of ``matrix``.
        row_weights: Not negative; None where all rows count alike.

    Shape:
        ``matrix (rows, columns)``, ``row_weights (rows,) -> (rows, rank), (rank, columns)``, in float32 (float64 for a
        float64 matrix); the rows of the second are orthonormal.

    Source:
        Eckart and Young, Psychometrika 1 (1936), for the matrix with weighted rows.
    """
    matrix = _pad(matrix, *matrix.shape)
    weighted = matrix if row_weights is None else matrix * row_weights.to(matrix.dtype).sqrt()[:, None]
    basis = _leading_basis(weighted.T, rank)
    return matrix @ basis, basis.T.contiguous()


def relative_error(approximation: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference, divided by that of ``exact`` (0 for two zero matrices)."""
    exact = exact.to(approximation.dtype)
    norm = torch.linalg.vector_norm(exact, dtype=torch.float64).item()
    difference = torch.linalg.vector_norm(approximation - exact, dtype=torch.float64).item()
    return difference / norm if norm else difference


def _pad(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """``matrix`` in float32 or float64, with zero rows and columns up to the padded sizes."""
    dtype = matrix.dtype if matrix.dtype == torch.float64 else torch.float32
    missing = (0, columns - matrix.shape[1], 0, rows - matrix.shape[0])
    return torch.nn.functional.pad(matrix.detach().to(dtype), missing)


def _decompose(flat: Tensor, factors: Sequence[int], ranks: Sequence[int]) -> list[Tensor]:
    """Split one factor off at a time: basis of the unfolding, projection, on to the rest."""
    cores = []
    rest, left_rank = flat, 1
    for factor, rank in zip(factors[:-1], ranks, strict=True):
        unfolding = rest.reshape(left_rank * factor, -1)
        basis = _leading_basis(unfolding, min(rank, *unfolding.shape))
        basis = torch.nn.functional.pad(basis, (0, rank - basis.shape[1]))  # a rank above the useful one stays zero
        cores.append(basis.reshape(left_rank, factor, rank))
        rest, left_rank = basis.T @ unfolding, rank
    cores.append(rest.reshape(left_rank, factors[-1], 1))
    return balance(cores)


def _leading_basis(matrix: Tensor, rank: int) -> Tensor:
    """Orthonormal ``(rows, rank)`` basis of the leading left singular vectors."""
    rows, columns = matrix.shape
    if rows <= GRAM_LIMIT:
        return _top_eigenvectors(_gram(matrix), rank).to(matrix.dtype)
    if columns <= GRAM_LIMIT:
        right = _top_eigenvectors(_gram(matrix.T), rank).to(matrix.dtype)
        return torch.linalg.qr(matrix @ right).Q
    return _random_range(matrix, rank)


def _gram(matrix: Tensor) -> Tensor:
    """``matrix @ matrix.T`` in float64, one slice of columns at a time to keep the double-precision copy small."""
    gram = torch.zeros(matrix.shape[0], matrix.shape[0], dtype=torch.float64, device=matrix.device)
    for slice_ in matrix.split(1 << 16, dim=1):
        part = slice_.double()
        gram.addmm_(part, part.T)
    return gram


def _top_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    return torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :rank]


def _random_range(matrix: Tensor, rank: int) -> Tensor:
    """Randomised subspace iteration; the draw is seeded, so that the same weights give the same cores."""
    sketch = min(rank + OVERSAMPLING, *matrix.shape)
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(matrix.shape[1], sketch, generator=generator, dtype=matrix.dtype).to(matrix.device)
    basis = torch.linalg.qr(matrix @ draw).Q
    for _ in range(POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    rotation = _top_eigenvectors(_gram(basis.T @ matrix), rank).to(matrix.dtype)
    return basis @ rotation


def balance(cores: list[Tensor]) -> list[Tensor]:
    """Scale the cores so that all have the same root mean square; their product stays what it was."""
    sizes = [math.sqrt(core.square().mean().item()) for core in cores]
    if min(sizes) == 0.0:
        return cores
    common = math.exp(sum(map(math.log, sizes)) / len(sizes))
    return [core * (common / size) for core, size in zip(cores, sizes, strict=True)]
