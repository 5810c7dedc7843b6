"""The base class of blocks. A block fuses the layers of a module, whose class it exchanges for a subclass in place.

A block knows a module by the text of its forward. So it serves every architecture that has the same text, and none
whose forward a release of Transformers has changed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from hf_comera.modules.tt_linear import TTLinear

__all__ = ["Block", "exchange_class", "is_watched", "layer_refusal", "restore_class", "text_digest"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_CAPTURES_OUTPUTS = "transformers.utils.output_capturing"
"""Module of the hooks that gather hidden states and weights of attention; a block gives both in their places."""


if TYPE_CHECKING:

    class _OwnClass(nn.Module):
        """Stands for a module's own class, whose attributes and methods nothing tells before it is fused."""

        def __getattr__(self, name: str) -> Any: ...

else:
    _OwnClass = object


class Block(_OwnClass):
    """First base class of a fused module; the second is the module's own class, so ``super()`` is its own forward."""

    own_class: ClassVar[type[nn.Module]]
    arguments: ClassVar[tuple[str, ...]]
    """Names of what the own forward takes after its first argument."""
    home: ClassVar[str]
    """Name of the module in which the own forward is written."""
    spec: ClassVar[Any]
    """How the own forward names its parts: its row in the table of the block."""

    @classmethod
    def row(cls, own_class: type[nn.Module]) -> Any:
        """The row of the table for modules of ``own_class``, or None if its forward is not in it."""
        raise NotImplementedError

    title: ClassVar[str]
    """The name of the block."""

    @property
    def is_complete(self) -> bool:
        """Whether it is a block by itself, and not a part of one that a module around it makes."""
        return True

    def refusal(self) -> str | None:
        """Why the module's own forward runs instead of the block, or None if the block does."""
        raise NotImplementedError

    def fused_layers(self) -> list[TTLinear]:
        """The layers that the block computes with, whose own forward it does not call."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and deep-copy through the module's own class, since the subclass has no importable name."""
        block = type(self).__bases__[0]
        return _new_instance, (block, self.own_class), self.__dict__.copy()


def exchange_class(module: nn.Module, block: type[Block]) -> None:
    """Make ``module`` a ``block``, in place; its class keeps its name."""
    module.__class__ = _fused_class(block, type(module))  # type: ignore[arg-type]


def restore_class(module: nn.Module) -> None:
    """Undo :func:`exchange_class`; nothing happens to a module that is no block."""
    if isinstance(module, Block):
        module.__class__ = type(module).own_class  # type: ignore[assignment]


@functools.cache
def text_digest(function: Callable[..., Any]) -> str | None:
    """Digest of the text of a function: names of arguments and body, without annotations, docstring and comments.

    Returns:
        None where the text cannot be read.
    """
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    body = [line for line in definition.body if not _is_docstring(line)]
    lines = [",".join(argument.arg for argument in definition.args.args), *map(ast.unparse, body)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def layer_refusal(layers: Iterable[Any]) -> str | None:
    """Why a block cannot compute with the halves of these layers, or None if it can."""
    for layer in layers:
        if type(layer) is not TTLinear:
            return f"a {type(layer).__name__} is in the place of a TTLinear"
        if is_watched(layer):
            return "a hook watches one of its layers"
        if layer.prefers_dense:
            return f"middle rank {layer.middle_rank} is so high that a layer multiplies with its dense matrix"
    return None


def is_watched(part: Any) -> bool:
    """Whether a hook watches the input or output of ``part``, a module or a function."""
    if not isinstance(part, nn.Module):
        return False
    if "forward" in part.__dict__ or hasattr(part, "_hf_hook"):
        return True
    hooks = (hook for name in _HOOKS for hook in getattr(part, name).values())
    return any(hook.__module__ != _CAPTURES_OUTPUTS for hook in hooks)


@functools.cache
def _fused_class(block: type[Block], own_class: type[nn.Module]) -> type[nn.Module]:
    names = tuple(inspect.signature(own_class.forward).parameters)
    return type(
        own_class.__name__,
        (block, own_class),
        {
            "__module__": own_class.__module__,
            "__qualname__": own_class.__qualname__,
            "__doc__": own_class.__doc__,
            "own_class": own_class,
            "arguments": names[2:],
            "home": inspect.unwrap(own_class.forward).__module__,
            "spec": block.row(own_class),
        },
    )


def _new_instance(block: type[Block], own_class: type[nn.Module]) -> Any:
    cls = _fused_class(block, own_class)  # type: ignore[arg-type]
    return cls.__new__(cls)


def _is_docstring(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
