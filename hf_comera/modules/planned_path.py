"""The contraction path that a layer takes: the planned one, where it is markedly sooner than the two-sided one."""

from functools import lru_cache
from typing import Any

import torch

from hf_comera.ops.halves import padded_rank
from hf_comera.tt.machine import CPU_THREAD, H200
from hf_comera.tt.path import ContractionPath, candidate_paths, plan_path

__all__ = ["planned_path"]

# The two-sided path shares its halves with all layers, and its codes with siblings: another must save more than that.
WORTH_ANOTHER_PATH = 0.8


@lru_cache(maxsize=4096)
def planned_path(
    sizes: tuple[Any, ...],
    ranks: tuple[int, ...],
    rows: int,
    dtype: torch.dtype,
    on_gpu: bool,
    *,
    training: bool,
) -> tuple[ContractionPath, ContractionPath]:
    """The path to take, and the two-sided one, which is taken where another would hardly be sooner.

    Args:
        sizes: Input factors, output factors, input features, output features.
        ranks: One per inner bond; the middle one is rounded up as its halves are.
        rows: Rows of the input.
        dtype: In which the layer computes.
        on_gpu: Whether speeds assumed are those of a GPU: of an H200, for every GPU.
        training: Whether backward counts.
    """
    in_factors, out_factors, in_features, out_features = sizes
    middle = len(in_factors) - 1
    best = plan_path(
        in_factors,
        out_factors,
        (*ranks[:middle], padded_rank(ranks[middle]), *ranks[middle + 1 :]),
        rows,
        training=training,
        halves_cached=True,
        machine=H200 if on_gpu else CPU_THREAD,
        dtype=dtype,
        in_features=in_features,
        out_features=out_features,
    )
    two_sided = next(path for path in candidate_paths(best.problem) if path.kind == "two-sided")
    return (best if best.seconds < WORTH_ANOTHER_PATH * two_sided.seconds else two_sided), two_sided
