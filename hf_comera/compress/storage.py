"""Weights as a checkpoint stores them: which of them as int8 or int4 rows, packed for saving, unpacked on loading.

Stored so are cores, tables and all other weights with two axes or more, where that saves a quarter or more. Biases,
norms, rank gates and tiny tensors stay as they are. A packed tensor has the name of its parameter and says by its
dtype what it is: int8 for int8, uint8 for int4.
"""

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from hf_comera.compress.config import OTHERS, STORAGES
from hf_comera.compress.selection import pattern_value
from hf_comera.modules import compressed_layers
from hf_comera.ops.quantization import PACKED_DTYPES, dequantise_rows, packed_width, quantise_rows

__all__ = ["check_storage_names", "packed_state", "storage_bits", "stored_bytes", "unpack_state", "unpacked"]

FEWEST_ENTRIES = 128
"""Of a packed tensor: what fewer save is less than the entry of their name in a file."""

LARGEST_SHARE = 0.75
"""Of the bytes of a tensor, that its packed form may take."""


def storage_bits(model: nn.Module, storage: Any) -> dict[str, int]:
    """Bits of the integers of each parameter that ``storage`` has packed; a shared one has those of its first name.

    Args:
        model: Compressed or not; may live on the meta device.
        storage: The setting of ``ComeraConfig``.
    """
    owners = _owners(model)
    found: dict[int, int | None] = {}
    bits = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in found:
            wanted = STORAGES[_value(storage, owners[name])]
            found[id(parameter)] = wanted if wanted and _pays(parameter, wanted) else None
        if (number := found[id(parameter)]) is not None:
            bits[name] = number
    return bits


def check_storage_names(model: nn.Module, storage: Any) -> None:
    """Refuse a pattern that matches no layer of ``model``.

    Raises:
        ValueError: With the pattern and the names that there are.
    """
    names = dict.fromkeys(_owners(model).values())
    for pattern in storage if isinstance(storage, Mapping) else ():
        if pattern != OTHERS and not any(pattern_value({pattern: True}, name) for name in names):
            last = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            raise ValueError(
                f"storage: {pattern!r} matches no layer of {type(model).__name__} that has parameters. It has "
                f"{', '.join(last[:12])}{' and more' if len(last) > 12 else ''}. Use one of them, or {OTHERS!r} for "
                "all others."
            )


def stored_bytes(model: nn.Module, storage: Any) -> int:
    """Bytes of the parameters of ``model`` in a checkpoint; shared ones count once."""
    bits = storage_bits(model, storage)
    return sum(_bytes(parameter, bits.get(name)) for name, parameter in model.named_parameters())


def packed_state(model: nn.Module, state: Mapping[str, Tensor], storage: Any) -> dict[str, Tensor]:
    """``state`` of ``model`` as it is stored; tensors that share memory share the packed one.

    Raises:
        ValueError: If a tensor has entries that are no numbers, or is not whole in this process. Also if the model
            holds 8-bit integers of its own, which could not be told from packed ones.
    """
    bits = storage_bits(model, storage)
    packed: dict[tuple[Any, ...], Tensor] = {}
    result = dict(state)
    for name, tensor in state.items():
        if name not in bits:
            if tensor.dtype in PACKED_DTYPES:
                raise ValueError(
                    f"{name} has dtype {tensor.dtype} in the model itself, so it could not be told from a weight that "
                    'is stored in int8 or int4. Save the model with storage="float".'
                )
            continue
        if tensor.is_meta or hasattr(tensor, "placements"):
            raise ValueError(
                f"{name} is offloaded or sharded, and only whole weights are stored in int{bits[name]}. Load the "
                "model without offloading, gather its state and hand it over (save_pretrained(state_dict=...)), or "
                'save with storage="float".'
            )
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if place not in packed:
            try:
                packed[place] = quantise_rows(tensor, bits[name])
            except ValueError as error:
                raise ValueError(
                    f"{name} cannot be stored in int{bits[name]}: {error}. Save an earlier state of the model, or "
                    'this one as it is, with storage="float".'
                ) from error
        result[name] = packed[place]
    return result


def unpack_state(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Unpack, in ``state``, what ``module`` has as floating-point parameters under ``prefix``.

    Raises:
        ValueError: If a packed tensor does not fit its parameter.
    """
    for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        found = state.get(name)
        if isinstance(found, Tensor) and found.dtype in PACKED_DTYPES and parameter.is_floating_point():
            state[name] = unpacked(name, found, parameter, parameter.dtype)


def unpacked(name: str, packed: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that ``packed`` holds; of a core, the first and the last axis may differ from those of ``like``.

    Raises:
        ValueError: If ``packed`` is nothing that was packed, or its rows are not made of the inner axes of ``like``.
    """
    inner = math.prod(like.shape[1:-1])
    try:
        rows = dequantise_rows(packed, dtype)
        if like.dim() < 2 or not inner or rows.shape[1] % inner:
            raise ValueError(f"rows of {rows.shape[1]} entries do not fit {tuple(like.shape)}")
    except ValueError as error:
        raise ValueError(f"{name}: {error}. The checkpoint is damaged: copy it again, or save it again.") from error
    return rows.view(len(rows), *like.shape[1:-1], rows.shape[1] // inner)


def _owners(model: nn.Module) -> dict[str, str]:
    """Of each parameter, the name of the layer that patterns match: all parts of a compressed layer are one."""
    layers = compressed_layers(model)
    owners = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        above = accumulate(name.split(".")[:-1], lambda *parts: ".".join(parts))
        owners[name] = next((layer for layer in above if layer in layers), name.rpartition(".")[0])
    return owners


def _value(storage: Any, name: str) -> str:
    """The storage of a layer: that of the longest pattern, since files do not keep their order."""
    if not isinstance(storage, Mapping):
        return storage or "float"
    patterns = sorted(storage.keys() - {OTHERS}, key=lambda pattern: (-len(pattern), pattern))
    found = pattern_value({pattern: storage[pattern] for pattern in patterns}, name)
    return found or storage.get(OTHERS, "float")


def _pays(parameter: Tensor, bits: int) -> bool:
    if parameter.dim() < 2 or parameter.numel() < FEWEST_ENTRIES or not parameter.is_floating_point():
        return False
    return _bytes(parameter, bits) <= LARGEST_SHARE * _bytes(parameter, None)


def _bytes(parameter: Tensor, bits: int | None) -> int:
    if bits is None:
        return parameter.numel() * parameter.element_size()
    return parameter.shape[0] * packed_width(math.prod(parameter.shape[1:]), bits)
