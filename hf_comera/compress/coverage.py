"""How much of a model is in compressed layers, and the parts that stay dense: their share, and why."""

import logging
import re
from dataclasses import dataclass

from torch import Tensor, nn

from hf_comera.compress.matching import COMPRESSIBLE_TYPES
from hf_comera.compress.size import size_report
from hf_comera.modules import CompressedLayer

__all__ = ["DensePart", "dense_parts", "warn_if_mostly_dense"]

logger = logging.getLogger(__name__)

SMALLEST_COMPRESSED_SHARE = 0.5
"""Of the parameters of a dense model; where less of them is compressed, the whole model hardly shrinks."""

LISTED_PARTS, SMALLEST_LISTED_SHARE = 3, 0.05


@dataclass(frozen=True, kw_only=True)
class DensePart:
    """Parameters that stay as they are: one of each layer of a stack counts as one part."""

    pattern: str
    """Name of the parameter, with ``*`` for the numbers of layers."""
    parameters: int
    reason: str
    """Why it is no tensor train."""


def dense_parts(model: nn.Module) -> list[DensePart]:
    """All parameters that are not of compressed layers, the largest part first; shared ones count once."""
    sizes: dict[tuple[str, str], int] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        trained = {id(p) for p in module.train_parameters()} if isinstance(module, CompressedLayer) else set()
        for name, parameter in module.named_parameters(module_name, recurse=False):
            if id(parameter) not in seen | trained:
                pattern = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)
                key = (pattern, _reason(module, name.rpartition(".")[2], parameter))
                sizes[key] = sizes.get(key, 0) + parameter.numel()
            seen.add(id(parameter))
    parts = [DensePart(pattern=pattern, parameters=size, reason=why) for (pattern, why), size in sizes.items()]
    return sorted(parts, key=lambda part: -part.parameters)


def warn_if_mostly_dense(model: nn.Module) -> None:
    """Say so where less than half of the parameters is in compressed layers, with the largest parts that are not."""
    report = size_report(model)
    share = report.compressed_dense_parameters / max(report.dense_parameters, 1)
    if share >= SMALLEST_COMPRESSED_SHARE:
        return
    listed = [
        f"{part.parameters / report.dense_parameters:.0%} {part.pattern} ({part.reason})"
        for part in dense_parts(model)[:LISTED_PARTS]
        if part.parameters >= SMALLEST_LISTED_SHARE * report.dense_parameters
    ]
    logger.warning(
        "Only %.0f %% of the parameters of %s are in compressed layers, so the whole model is %.2f times smaller. The "
        "largest parts that stay dense: %s. Tensor trains replace the weights of layers of exactly the types Linear, "
        "Conv1D and Embedding; target_modules names them.",
        *(100 * share, type(model).__name__, report.ratio, ", ".join(listed)),
    )


def _reason(module: nn.Module, name: str, parameter: Tensor) -> str:
    """What keeps a parameter of ``module`` from being a tensor train."""
    kind = type(module).__name__
    if type(module) in COMPRESSIBLE_TYPES and name == "weight":
        return f"{kind} that is not targeted"
    base = next((base.__name__ for base in COMPRESSIBLE_TYPES if isinstance(module, base)), None)
    if base is not None and type(module) not in COMPRESSIBLE_TYPES and name == "weight":
        return f"{kind}, which may compute more than {base}"
    if parameter.dim() > 2:
        return f"{parameter.dim()} dimensions, in {kind}"
    return f"in {kind}"
