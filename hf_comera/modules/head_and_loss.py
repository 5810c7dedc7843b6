"""Head and loss of a language model as one block: while it trains, logits exist for labelled tokens only, in chunks.

The block takes the place of a model's ``forward``. It calls the model's own forward with a head that hands hidden
states on, and computes the loss from these (:mod:`hf_comera.ops.fused_loss`). The kind of loss is read in the source
of the model's forward. Where that source does something else to the logits (scales, caps or shifts them), the model's
own forward runs.

``outputs.logits`` is computed from the hidden states when it is read.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_outputs
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.utils.generic import ModelOutput

from hf_comera.modules.factorized_embedding import FactorizedEmbedding
from hf_comera.modules.tied import TiedHead
from hf_comera.modules.tt_linear import TTLinear
from hf_comera.ops.fused_loss import IGNORED, has_values, head_cross_entropy, is_recorded
from hf_comera.ops.precision import autocast_dtype, without_autocast

__all__ = ["HeadAndLoss", "head_and_loss_forward", "head_left_out", "set_head_and_loss"]

LANGUAGE_MODELS = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Last parts of the names of classes whose ``labels`` are ids of tokens."""

MEAN, LOSS_FUNCTION = "mean", "loss_function"
"""The loss of a forward: ``CrossEntropyLoss()`` in place, or ``self.loss_function``, which Transformers hands out."""

MEANS = {
    *("CrossEntropyLoss()", "nn.CrossEntropyLoss()", "self.mlm_loss_fct"),
    f"CrossEntropyLoss(ignore_index={IGNORED})",
}
"""Source of what makes the first."""

OTHER_LOSSES = ("output_router_logits",)
"""Options that add to the loss of the labels."""


@dataclass(frozen=True)
class HeadAndLoss:
    """How one model computes logits and loss, as far as the block knows it.

    Attributes:
        head: Name of the child of the model from whose result logits are.
        projection: Name of the layer in it that makes logits of hidden states; ``""`` for the head itself.
        loss: ``"mean"`` or ``"loss_function"``.
        decodes: Whether the model makes the inputs of its decoder from the labels.
    """

    head: str
    projection: str
    loss: str
    decodes: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> HeadAndLoss | str:
        """The block for ``model``, or why there is none."""
        if not type(model).__name__.endswith(LANGUAGE_MODELS):
            return f"{type(model).__name__} is no language model with one head"
        projection = model.get_output_embeddings()
        name = next((name for name, module in model.named_modules() if module is projection), None)
        if projection is None or name is None:
            return "the model has no output embeddings"
        head, _, inner = name.partition(".")
        loss = _loss_in_source(getattr(type(model), "_dense_class", type(model)), head)  # type: ignore[arg-type]
        if loss not in (MEAN, LOSS_FUNCTION):
            return loss
        width = getattr(model.config.get_text_config(), "hidden_size", 0)
        if not _hands_on(model.get_submodule(head), inner, width):
            return f"{head!r} does something to the logits"
        decodes = "decoder_input_ids" in inspect.signature(type(model).forward).parameters
        return cls(head, inner, loss, decodes)

    def applies(self, model: PreTrainedModel, options: dict[str, Any]) -> bool:
        """Whether a call of ``model`` with ``options`` is one of training with labels that the block can serve."""
        labels = options.get("labels")
        if not isinstance(labels, Tensor) or not model.training or not torch.is_grad_enabled() or _is_followed():
            return False
        if options.get("logits_to_keep") or options.get("return_dict") is False or not model.config.return_dict:
            return False
        if any(options.get(name, getattr(model.config, name, False)) for name in OTHER_LOSSES):
            return False
        if self.loss == LOSS_FUNCTION and model.loss_function not in (ForCausalLMLoss, ForMaskedLMLoss):
            return False
        projection = model.get_submodule(f"{self.head}.{self.projection}".rstrip("."))
        if projection is not model.get_output_embeddings() or not _is_plain(model.get_submodule(self.head)):
            return False
        if torch.compiler.is_compiling() and not _Headless.fits(model, self.head):
            return False
        size = getattr(model.config.get_text_config(), "vocab_size", None)
        return _is_projection(projection) and size in (None, projection.out_features)

    def __call__(
        self, model: Any, own_forward: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """The result of ``own_forward``, its logits deferred."""
        labels = options["labels"]
        options = {**options, "labels": None}
        if self.decodes and options.get("decoder_input_ids") is None and options.get("decoder_inputs_embeds") is None:
            options["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
            options["use_cache"] = False
        compiling = torch.compiler.is_compiling()
        headless: _Headless = model.headless if compiling else _Headless.of(model, self)
        outputs = own_forward(headless.model, *args, **options)
        if compiling and type(outputs) not in _deferring:
            return own_forward(model, *args, **{**options, "labels": labels})
        return self._with_loss(model, headless, outputs, labels, options)

    def _with_loss(
        self,
        model: PreTrainedModel,
        headless: _Headless,
        outputs: Any,
        labels: Tensor,
        options: dict[str, Any],
    ) -> ModelOutput:
        """``outputs``, whose logits are hidden states, with the loss and with logits that are computed when read."""
        loss = self._loss(model, headless, outputs.logits, labels, options)
        fields = {name: getattr(outputs, name, None) for name in type(outputs).__dataclass_fields__}
        fields |= {"loss": loss, "logits": DeferredLogits(model.get_submodule(self.head), outputs.logits)}
        return _deferring[type(outputs)](**fields)

    def _loss(
        self, model: PreTrainedModel, headless: _Headless, hidden: Tensor, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        ignored, total = IGNORED, None
        if self.loss == LOSS_FUNCTION:
            ignored, total = options.get("ignore_index", IGNORED), options.get("num_items_in_batch")
            if model.loss_function is ForCausalLMLoss:
                given = options.get("shift_labels")
                labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignored) if given is None else given
        head = model.get_submodule(self.head)
        labels = labels.to(hidden.device)
        if labels.numel() == hidden.shape[:-1].numel():  # else the operator says what is needed
            labels = labels.reshape(hidden.shape[:-1])
        if self.projection and labels.shape == hidden.shape[:-1]:  # what is before it, for labelled tokens only
            if not is_recorded(hidden) and not torch.compiler.is_compiling():
                places = (labels.flatten() != ignored).nonzero()[:, 0] if has_values(hidden) else _all(labels)
                hidden, labels = hidden.flatten(0, -2)[places], labels.flatten()[places]
            hidden = headless.head(hidden)
        projection: Any = head.get_submodule(self.projection)
        if isinstance(source := getattr(projection, "source", None), FactorizedEmbedding):
            hidden = source.narrow(hidden)
        summed = head_cross_entropy(hidden, _table(projection), projection.bias, labels, ignore_index=ignored)
        if self.loss == LOSS_FUNCTION:  # which computes in float32, whatever the model
            summed = summed.float()
        if total is None:
            total = (labels != ignored).sum()
        return summed / (total.to(summed.device) if isinstance(total, Tensor) else total)


def set_head_and_loss(model: PreTrainedModel, enabled: bool = True) -> None:
    """Compute head and loss of a language model as one block while it trains, or as the model's own forward does.

    The block is on in compressed models where it can be. It gives the same loss; ``outputs.logits`` are computed when
    they are read. A dense model, too, can have it.

    Args:
        model: A model of Transformers, compressed or not.
        enabled: Whether the block is to be used.

    Raises:
        ValueError: If ``model`` is none for which there is a block, with the reason; without a block, ``enabled`` may
            be False.
    """
    for name in ("head_and_loss", "headless"):
        model.__dict__.pop(name, None)
    if vars(model).get("forward") is not None and hasattr(model.forward, "of_head_and_loss"):
        del model.forward
    if not enabled:
        return
    block = HeadAndLoss.of(model)
    if isinstance(block, str):
        raise ValueError(
            f"set_head_and_loss: there is no block for {type(model).__name__}: {block}. Its own forward computes the "
            "loss, as with enabled=False."
        )
    model.__dict__["head_and_loss"] = block
    model.__dict__["headless"] = headless = _Headless.of(model, block)
    headless.model.training = headless.head.training = True  # it serves training only
    if not hasattr(type(model).forward, "of_head_and_loss"):  # a dense model
        model.forward = types.MethodType(head_and_loss_forward(type(model).forward), model)


def head_and_loss_forward(own_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A ``forward`` that goes through the block of the model, ``model.head_and_loss``, wherever that applies."""

    @functools.wraps(own_forward)
    def forward(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        block = self.__dict__.get("head_and_loss")
        if block is None or not block.applies(self, options):
            return own_forward(self, *args, **options)
        return block(self, own_forward, args, options)

    forward.of_head_and_loss = True  # type: ignore[attr-defined]
    return forward


class HandOn(nn.Module):
    """In place of a head: its result is what it is given."""

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``, the same object."""
        return hidden


@contextlib.contextmanager
def head_left_out(model: PreTrainedModel, block: HeadAndLoss | None) -> Iterator[nn.Module]:
    """Within, a forward pass of ``model`` without labels has hidden states as its ``logits``.

    Wrappers of the model, such as DDP, may be called as well.

    Args:
        model: Its head is put aside.
        block: Of the model, from :meth:`HeadAndLoss.of`; None where there is none, and logits stay logits.

    Yields:
        From what the model gives within to its logits, for as few tokens at a time as one likes.
    """
    if block is None:
        yield HandOn()
        return
    head = model.get_submodule(block.head)
    model._modules[block.head] = HandOn()
    try:
        yield head
    finally:
        model._modules[block.head] = head


class DeferredLogits:
    """Logits that are computed when they are read, with the gradient mode of the reader.

    Args:
        head: From hidden states to logits.
        hidden: What the head was given.
    """

    def __init__(self, head: nn.Module, hidden: Tensor) -> None:
        self._head, self._hidden = head, hidden
        # compiled code cannot ask for versions: a head that has changed is not noticed there
        self._versions = None if torch.compiler.is_compiling() else _versions(head)
        self._autocast = autocast_dtype(hidden)
        self.dtype = self._autocast
        """Of the logits, for those who convert outputs."""

    def float(self) -> DeferredLogits:
        """The same in float32, as Accelerate converts outputs."""
        deferred = object.__new__(DeferredLogits)
        deferred.__dict__ = {**self.__dict__, "dtype": torch.float32}
        return deferred

    def compute(self) -> Tensor:
        """The logits.

        Raises:
            RuntimeError: If the head has changed since the forward pass.
        """
        if self._versions is not None and _versions(self._head) != self._versions:
            raise RuntimeError(
                "outputs.logits is computed when it is read, and the head has changed since the forward pass, so "
                "these would be other logits. Read them before the optimizer steps, or call "
                "model.set_head_and_loss(False), with which each forward pass computes all logits."
            )
        hidden, autocast = self._hidden, without_autocast(self._hidden)
        if self._autocast != hidden.dtype:
            autocast = torch.autocast(hidden.device.type, self._autocast)
        with autocast:
            return self._head(hidden).to(self.dtype)


class _DeferringOutput:
    """An output of Transformers whose ``logits`` may be deferred; iterating over ``items()`` does not compute them."""

    @property
    def logits(self) -> Tensor | None:
        """Computed at the first read, and at the first with gradients."""
        value = self.__dict__.get("logits")
        if not isinstance(value, DeferredLogits):
            return value
        made = self.__dict__.setdefault("_made_logits", {})
        mode = torch.is_grad_enabled()
        if mode not in made:
            made[mode] = value.compute()
        return made[mode]

    @logits.setter
    def logits(self, value: Any) -> None:
        self.__dict__["logits"] = value
        self.__dict__.pop("_made_logits", None)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return tuple(self[name] for name in list(self.keys())[key])  # type: ignore[attr-defined]
        name = key if isinstance(key, str) else list(self.keys())[key]  # type: ignore[attr-defined]
        return self.logits if name == "logits" else super().__getitem__(name)  # type: ignore[misc]

    def get(self, key: str, default: Any = None) -> Any:
        """The field, or ``default`` where it is None."""
        return self[key] if key in self else default  # type: ignore[operator]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied with the logits, as the ordinary output."""
        bases: tuple[Any, ...] = type(self).__bases__
        (ordinary,) = (base for base in bases if base is not _DeferringOutput)
        return ordinary, tuple(getattr(self, name) for name in ordinary.__dataclass_fields__)


class _DeferringClasses(dict[type[ModelOutput], type[ModelOutput]]):
    """For each class of outputs the one that defers logits; compiled code finds those that are there."""

    def __missing__(self, output_class: type[ModelOutput]) -> type[ModelOutput]:
        made = type(output_class.__name__, (_DeferringOutput, output_class), {"__module__": __name__})
        return self.setdefault(output_class, made)


_deferring = _DeferringClasses()
for _output_class in (
    modeling_outputs.CausalLMOutput,
    modeling_outputs.CausalLMOutputWithCrossAttentions,
    modeling_outputs.CausalLMOutputWithPast,
    modeling_outputs.MaskedLMOutput,
    modeling_outputs.MoeCausalLMOutputWithPast,
    modeling_outputs.Seq2SeqLMOutput,
):
    _deferring[_output_class]


class _Headless:
    """A model whose head hands hidden states on, and that head without its projection; they share all else.

    Compiled code cannot make one, and takes that of ``model.headless``.
    """

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        self.model, self.head = model, head

    @classmethod
    def of(cls, model: nn.Module, block: HeadAndLoss) -> _Headless:
        """That of ``model`` as it is."""
        head = model.get_submodule(block.head)
        return cls(_with_child(model, block.head, HandOn()), _with_child(head, block.projection, HandOn()))

    @staticmethod
    def fits(model: nn.Module, head: str) -> bool:
        """Whether ``model.headless`` still shares all children of ``model`` but the head."""
        headless = model.__dict__.get("headless")
        if headless is None or not headless.model.training:
            return False
        children = headless.model._modules
        return all(children.get(name) is child for name, child in model._modules.items() if name != head)


def _with_child(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """``module``, sharing all with it but the child (or descendant) ``name``."""
    if not name:
        return child
    first, _, rest = name.partition(".")
    copy = object.__new__(type(module))
    inner = _with_child(module.get_submodule(first), rest, child) if rest else child
    copy.__dict__ = {**module.__dict__, "_modules": {**module._modules, first: inner}}
    return copy


def _is_followed() -> bool:
    """Whether an exporter or a transform follows the tensors, which takes the model's own forward."""
    is_traced = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    return is_traced or torch._C._are_functorch_transforms_active()


def _all(labels: Tensor) -> Tensor:
    """Places of all tokens: without values none can be left out."""
    return torch.arange(labels.numel(), device=labels.device)


def _is_plain(head: nn.Module) -> bool:
    """Whether nothing wants to see calls of ``head`` or of its projection, nor brings in what this is tied to."""
    tied = (module.source.modules() for module in head.modules() if isinstance(module, TiedHead))
    sources = [part for parts in tied for part in parts]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_hf_hook")
    if any(getattr(module, name, None) for module in head.modules() for name in hooks):
        return False
    # hooks on what the embedding gives, such as that of gradient checkpointing, are none of the head's business
    return not any(getattr(source, name, None) for source in sources for name in ("_forward_pre_hooks", "_hf_hook"))


def _is_projection(module: nn.Module) -> bool:
    is_dense_or_tied = type(module) in (nn.Linear, TiedHead) and "forward" not in module.__dict__
    return isinstance(module, TTLinear) or is_dense_or_tied


def _table(projection: TTLinear | TiedHead | nn.Linear) -> Tensor:
    """``(vocabulary, width)``, differentiable; of tensor trains it is built for this one use."""
    if isinstance(projection, TiedHead):
        source = projection.source
        return source.narrow_table() if isinstance(source, FactorizedEmbedding) else source.dense()
    return projection.dense() if isinstance(projection, TTLinear) else projection.weight


def _versions(head: nn.Module) -> list[tuple[int, int]]:
    """Of all that its logits depend on."""
    sources = [module.source for module in head.modules() if isinstance(module, TiedHead)]
    parameters = (parameter for module in (head, *sources) for parameter in module.parameters())
    return [(parameter.untyped_storage()._cdata, parameter._version) for parameter in parameters]


def _hands_on(head: nn.Module, inner: str, width: int) -> bool:
    """Whether logits are the projection's result, and nothing is done to them in ``head``, which takes ``width``."""
    if not inner:
        return True
    weight = next(head.parameters())
    seen: list[Tensor] = []

    class See(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append(hidden)
            return hidden

    try:
        with torch.no_grad():
            result = _with_child(head, inner, See())(weight.new_zeros(1, 1, width))
    except (RuntimeError, TypeError, ValueError, AttributeError):  # it needs more than hidden states
        return False
    return len(seen) == 1 and result is seen[0]


@functools.cache
def _loss_in_source(model_class: type[PreTrainedModel], head: str) -> str:
    """Which loss the forward computes of the unchanged result of ``head``; else what stands against the block."""
    forward = inspect.unwrap(model_class.forward)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return "the source of its forward cannot be read"
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    logits = _assigned_from(tree, f"self.{head}")
    if logits is None:
        return f"its logits are not the result of self.{head}, once and unchanged"
    outputs = [call for call in calls if _keyword(call, "logits") == logits and _keyword(call, "loss") is not None]
    handed_on = [call for call in calls if "labels" in _arguments(call) and not _is_about_labels(call)]
    losses = [call for call in handed_on if ast.unparse(call.func) == "self.loss_function"]
    if not outputs or len(losses) != len(handed_on):
        return "its labels are used for more than the loss"
    if losses:
        return LOSS_FUNCTION if all(logits in _arguments(call) for call in losses) else "its loss is of other logits"
    flattened = [call for call in calls if _arguments(call)[1:2] in (["labels.view(-1)"], ["labels.reshape(-1)"])]
    starts = f"{logits}.view(-1,", f"{logits}.reshape(-1,"
    made = {ast.unparse(call) for call in calls if ast.unparse(call.func).endswith("CrossEntropyLoss")}
    made |= {ast.unparse(call.func) for call in flattened} & {"self.mlm_loss_fct"}  # made by the constructor
    if flattened and all(_arguments(call)[0].startswith(starts) for call in flattened) and made and made <= MEANS:
        return MEAN
    return "its loss is none that is known"


def _assigned_from(tree: ast.AST, function: str) -> str | None:
    """The name that is given the result of the one call of ``function`` and nothing later."""
    stores = sorted(
        (node.lineno, node.col_offset, node.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == function]
    assigned = [
        (node.targets[0].id, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and node.value in made and isinstance(node.targets[0], ast.Name)
    ]
    if len(made) != 1 or len(assigned) != 1:
        return None
    ((name, line),) = assigned
    return None if any(stored == name and at > line for at, _, stored in stores) else name


def _arguments(call: ast.Call) -> list[str]:
    return [ast.unparse(value) for value in (*call.args, *(keyword.value for keyword in call.keywords))]


def _keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == name), None)


def _is_about_labels(call: ast.Call) -> bool:
    """Whether a call makes decoder inputs of the labels, as :meth:`HeadAndLoss.__call__` does itself."""
    return ast.unparse(call.func) in ("self._shift_right", "shift_tokens_right", "shift_right")
