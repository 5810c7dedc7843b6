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
    codes = tuple(part.code for part in parts)
    return first._replace(code=_shared(codes, ("joined",), lambda: torch.cat(codes, dim=1)))


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
    code, how, make = codes.code, None, None
    if code.ndim != 3:  # not keys or values, but what attention has made
        return None
    match func, args, kwargs:
        case Tensor.index_select, (0, Tensor() as index), {}:
            how, make = ("selected", index), lambda: code.index_select(0, index)
        case Tensor.repeat_interleave, (int() as repeats,), {"dim": 0}:
            how, make = ("repeated", repeats), lambda: code.repeat_interleave(repeats, dim=0)
        case Tensor.__getitem__, ((Tensor(ndim=1) as index, EllipsisType()),), {}:
            how, make = ("indexed", index), lambda: code[index]
        case Tensor.__getitem__, ((EllipsisType(), slice() as tokens, slice(start=None, stop=None, step=None)),), {}:
            how, make = ("cropped", tokens), lambda: code[:, tokens]
    return None if how is None or make is None else codes._replace(code=_shared((code,), how, make))


def copied(codes: HeadCodes, memo: dict[int, Any]) -> HeadCodes:
    """A copy to go on from, as a prompt that several texts begin with; what keys and values share stays shared."""
    return codes._replace(code=copy.deepcopy(codes.code, memo))


class _LastOfThread(threading.local):
    def __init__(self) -> None:
        self.codes: tuple[weakref.ref[Tensor], ...] = ()
        self.how: tuple[Any, ...] = ()
        self.made: weakref.ref[Tensor] | None = None


_last = _LastOfThread()


def _shared(codes: tuple[Tensor, ...], how: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    """``make()``; values, which a cache treats right after keys, get what was made of the same codes for them.

    Args:
        codes: What it is made of.
        how: In which way: a name, and what tells it apart from the same way at another time.
        make: Makes it.
    """
    made = None if _last.made is None else _last.made()
    same = len(codes) == len(_last.codes) and all(one() is code for one, code in zip(_last.codes, codes, strict=True))
    if made is None or not same or not _equal(how, _last.how) or made.requires_grad != torch.is_grad_enabled():
        made = make()
        _last.codes, _last.made = tuple(weakref.ref(code) for code in codes), weakref.ref(made)
        _last.how = tuple(each.clone() if isinstance(each, Tensor) else each for each in how)
    return made


def _equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if [type(each) for each in one] != [type(each) for each in other]:
        return False
    return all(torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b) for a, b in zip(one, other, strict=True))


def _stands_for_the_same(one: HeadCodes, other: HeadCodes) -> bool:
    """Whether both are keys, or values, of one layer that does not train.

    Where it trains, either half may have its own gradient. On a GPU a comparison would have to be waited for.
    """
    if one.code.ndim != 3 or other.code.ndim != 3 or one.num_heads != other.num_heads:
        return False
    traits = {(part.code.shape[0], part.right.shape, part.right.dtype, part.right.device) for part in (one, other)}
    if len(traits) > 1 or any(part.right.requires_grad or isinstance(part.right, FakeTensor) for part in (one, other)):
        return False
    return one.right is other.right or (one.right.device.type == "cpu" and torch.equal(one.right, other.right))
