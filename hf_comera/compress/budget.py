"""A wanted size as people say it: a part of the parameters, their number, or the bytes of the stored checkpoint."""

import copy
import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_comera.compress.allotment import allot, smallest_parameters
from hf_comera.compress.calibration import Calibration
from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.plan import CompressionPlan, plan
from hf_comera.compress.storage import stored_bytes
from hf_comera.compress.surgery import replace_layers
from hf_comera.modules import compressed_layers

__all__ = ["Budget", "parse_budget", "sized_config"]

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
ENTRY_BYTES = 100
"""Of a tensor in the header of a safetensors file, at most, besides its name."""
STEPS = 20_000
"""A budget of bytes is met to one part of this many of the dense parameters."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A wanted size, in one of three measures."""

    text: str
    """As it was written."""
    ratio: float | None = None
    """Part of the dense parameters."""
    parameters: int | None = None
    bytes: int | None = None
    """Of the files of weights of the checkpoint."""


def parse_budget(text: str) -> Budget:
    """Read a budget: ``0.25`` (a part), ``5.7M`` or ``5700000`` (parameters), ``8MB`` (bytes as stored).

    Raises:
        ValueError: If ``text`` is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmg]?)(b?)", text.strip().replace("_", ""), re.IGNORECASE)
    number = float(found[1]) if found else 0.0
    if not found or not number or (found[3] and not found[2]):
        raise ValueError(
            f"--budget {text} is no size. Give a part of the parameters, for example 0.25, or their number, for "
            "example 5.7M, or bytes of the stored checkpoint, for example 8MB."
        )
    if found[3]:
        return Budget(text=text, bytes=int(number * UNITS[found[2].lower()]))
    if not found[2] and number < 1:
        return Budget(text=text, ratio=number)
    parameters = number * UNITS[found[2].lower()]
    if parameters < 2:
        raise ValueError(
            f"--budget {text} leaves the model as it is. Give less than 1 as a part of its parameters, for example "
            "0.25, or their number, for example 5.7M."
        )
    return Budget(text=text, parameters=int(parameters))


def sized_config(
    model: PreTrainedModel, config: ComeraConfig, budget: Budget, calibration: Calibration
) -> ComeraConfig:
    """``config`` with the target that ``budget`` asks for; bytes are those of the whole model in ``config.storage``.

    Args:
        model: Dense.
        config: Which layers, and the storage.
        budget: The wanted size.
        calibration: Of ``model``, with sensitivities.

    Raises:
        ValueError: If the size cannot be reached, or is that of the model without any decomposition.
    """
    whole = plan(model, config)
    count = budget.parameters
    if budget.bytes is not None:
        count = _parameters_of_bytes(model, whole, config, budget, calibration)
    elif (count or 0) >= whole.dense_parameters:
        raise ValueError(
            f"--budget {budget.text} asks for {count:,} parameters, and the model has {whole.dense_parameters:,}. "
            f"Give fewer, for example {whole.dense_parameters // 4}."
        )
    return dataclasses.replace(config, target_ratio=budget.ratio, target_parameters=count)


def _parameters_of_bytes(
    model: PreTrainedModel, whole: CompressionPlan, config: ComeraConfig, budget: Budget, calibration: Calibration
) -> int:
    """The most parameters whose checkpoint has no more bytes than wanted, found by halving."""
    assert budget.bytes is not None
    with torch.device("meta"):
        skeleton: Any = type(model)(copy.deepcopy(model.config))
    skeleton.to(model.dtype).tie_weights()

    def size(parameters: int) -> int:
        wanted = dataclasses.replace(config, target_ratio=None, target_parameters=parameters)
        candidate = copy.deepcopy(skeleton)
        replace_layers(candidate, allot(whole, wanted, calibration), device="meta")
        candidate.tie_weights()
        return _checkpoint_bytes(candidate, config.storage)

    low, high = smallest_parameters(whole, calibration), whole.dense_parameters
    stored = _checkpoint_bytes(skeleton, config.storage)
    if stored <= budget.bytes:
        raise ValueError(
            f"--budget {budget.text} is met by the dense model, which has {stored:,} bytes stored as "
            f"{config.storage or 'float'}, so nothing need be decomposed: ComeraConfig(target_modules=[], "
            f"storage=...). Give fewer bytes, for example {stored // 2000}kB."
        )
    smallest = size(low)
    if smallest > budget.bytes:
        raise ValueError(
            f"--budget {budget.text} asks for {budget.bytes:,} bytes, but {smallest:,} are the fewest, with rank 1 in "
            f"all compressed layers and storage {config.storage or 'float'}. Give at least {-(-smallest // 1000)}kB, "
            "or a storage of fewer bytes, such as int4."
        )
    while high - low > max(1, whole.dense_parameters // STEPS):
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= budget.bytes else (low, middle)
    return low


def _checkpoint_bytes(model: PreTrainedModel, storage: Any) -> int:
    """Bytes of the files of weights, or a little more: how long their headers are is known when they are written."""
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = sum(tensor.nbytes for name, tensor in state.items() if name not in parameters)
    names = [*state, *(f"{name}.weight" for name in compressed_layers(model))]  # guards have an entry too
    return stored_bytes(model, storage) + buffers + sum(ENTRY_BYTES + len(name) for name in names) + 1000
