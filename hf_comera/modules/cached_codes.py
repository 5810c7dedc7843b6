"""What a cache of keys and values does, done with their codes: later tokens join, texts are reordered or cropped.

A cache of ``transformers`` holds what attention gave it, stand-ins too. Where one code serves as key and value, as in
GPT-2, both go on sharing it, so that a token takes as many numbers as the layer has ranks.
"""

import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_comera.ops.code_attention import HeadCodes

__all__ = ["copied", "cropped_or_selected", "put_together"]


def put_together(parts: Sequence[HeadCodes]) -> HeadCodes | None:
    """Codes of all tokens of ``parts``, one after the other; None if they do not stand for the same features.

    Shape:
        Codes ``(B, T_i, R)`` -> ``(B, sum of T_i, R)``.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if not all(_stands_for_the_same(part, first) for part in parts):
        return None
    return first._replace(code=_shared(lambda *codes: torch.cat(codes, dim=1), *(part.code for part in parts)))


def cropped_or_selected(
    codes: HeadCodes, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> HeadCodes | None:
    """What ``func`` makes of keys or values ``(B, H, T, D)``, if it is one of those that a cache calls; else None.

    Args:
        codes: Of the keys or values.
        func: A method of tensors.
        args: What it is given besides the keys or values.
        kwargs: The same by name.
    """
    if codes.code.ndim != 3:  # not keys or values, but what attention has made
        return None
    match func, args, kwargs:
        case Tensor.index_select, (0, Tensor() as index), {}:
            return codes._replace(code=_shared(lambda code, at: code.index_select(0, at), codes.code, index))
        case Tensor.repeat_interleave, (int() as repeats,), {"dim": 0}:
            return codes._replace(code=codes.code.repeat_interleave(repeats, dim=0))
        case Tensor.__getitem__, ((Tensor() as index, EllipsisType()),), {}:
            return codes._replace(code=codes.code[index])
        case Tensor.__getitem__, ((EllipsisType(), slice() as tokens, slice(start=None, stop=None, step=None)),), {}:
            return codes._replace(code=codes.code[:, tokens])
    return None


def copied(codes: HeadCodes, memo: dict[int, Any]) -> HeadCodes:
    """A copy to go on from, as a prompt that several texts begin with; what keys and values share stays shared."""
    return codes._replace(code=copy.deepcopy(codes.code, memo))


class _LastOfThread(threading.local):
    def __init__(self) -> None:
        self.sources: tuple[weakref.ref[Tensor], ...] = ()
        self.made: weakref.ref[Tensor] | None = None


_last = _LastOfThread()


def _shared(make: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """``make(*sources)``; values, which a cache treats right after keys, get what was made of the same code then."""
    made = None if _last.made is None else _last.made()
    same = len(sources) == len(_last.sources) and all(
        one() is other for one, other in zip(_last.sources, sources, strict=True)
    )
    if made is None or not same or made.requires_grad != torch.is_grad_enabled():
        made = make(*sources)
        _last.sources, _last.made = tuple(weakref.ref(source) for source in sources), weakref.ref(made)
    return made


def _stands_for_the_same(one: HeadCodes, other: HeadCodes) -> bool:
    """Whether both are keys, or values, of one layer; on a GPU a comparison of halves would have to be waited for."""
    if one.code.ndim != 3 or other.code.ndim != 3 or one.num_heads != other.num_heads:
        return False
    traits = {(part.code.shape[0], part.right.shape, part.right.dtype, part.right.device) for part in (one, other)}
    if len(traits) > 1 or isinstance(one.right, FakeTensor):
        return False
    return one.right is other.right or (one.right.device.type == "cpu" and torch.equal(one.right, other.right))
