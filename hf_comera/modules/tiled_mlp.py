"""Feed-forward blocks whose hidden layer is never whole in memory, forward or backward.

Source: tiling: Arctic Long Sequence Training, arXiv:2506.13996 (TiledMLP); that latents suffice in backward is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_comera.modules.block import Block, is_watched, layer_refusal, text_digest
from hf_comera.modules.fast_dropout import FastDropout
from hf_comera.modules.tt_linear import TTLinear
from hf_comera.ops import bit_dropout
from hf_comera.ops.precision import autocast_dtype, without_autocast
from hf_comera.ops.tiled_mlp import HiddenInput, tiled_mlp

__all__ = ["FORWARDS", "MLPSpec", "TiledLayer", "TiledMLP", "mlp_block"]


@dataclass(frozen=True)
class MLPSpec:
    """How one forward names its parts.

    Attributes:
        inner: Child into the hidden layer, whose output the activation is applied to.
        outer: Child out of it.
        activation: Child, or attribute with a function.
        gate: Child whose result the activated one is multiplied with; the same as ``inner`` if it gives both halves.
        hidden_dropout: Child that follows the product.
        output_dropout: Child that follows the outer layer.
    """

    inner: str
    outer: str
    activation: str
    gate: str | None = None
    hidden_dropout: str | None = None
    output_dropout: str | None = None


_LLAMA = MLPSpec("gate_proj", "down_proj", "act_fn", gate="up_proj")

FORWARDS = {
    "7472735ac171ccb3": _LLAMA,
    "c599660d788f3ac0": _LLAMA,
    "e3ffabc0d6981c68": MLPSpec("gate_proj", "down_proj", "act_fn", gate="up_proj", hidden_dropout="dropout"),
    "f7a9e702d2f573ab": MLPSpec("gate_up_proj", "down_proj", "activation_fn", gate="gate_up_proj"),  # Phi-3, GLM
    "5bd4a89ce64d323b": MLPSpec("fc1", "fc2", "activation_fn"),  # CLIP, SigLIP, ViT
    "5e4059d8589915ce": MLPSpec("fc1", "fc2", "act"),
    "b465f5d58ce11c39": MLPSpec("linear_fc1", "linear_fc2", "act_fn"),  # Qwen's vision towers
    "89aec9507263056f": MLPSpec("up_proj", "down_proj", "act_fn"),  # Arcee, Nemotron, DINOv3
    "e772fea7578d3f76": MLPSpec("lin1", "lin2", "act"),  # SAM
    "7257149f3f9854ce": MLPSpec("dense_h_to_4h", "dense_4h_to_h", "act"),  # GPT-NeoX
    "6365dadba5691278": MLPSpec("c_fc", "c_proj", "act", output_dropout="dropout"),  # GPT-2
    "2698a90bb1627803": MLPSpec("fc_in", "fc_out", "act", output_dropout="dropout"),  # GPT-J
    "05e8bbfc91805495": MLPSpec(  # wav2vec 2.0, HuBERT
        "intermediate_dense",
        "output_dense",
        "intermediate_act_fn",
        hidden_dropout="intermediate_dropout",
        output_dropout="output_dropout",
    ),
    "7bb21e5a2a79b928": MLPSpec("wi", "wo", "act", hidden_dropout="dropout"),  # T5
    "22684d7c3dce60ca": MLPSpec("wi_0", "wo", "act", gate="wi_1", hidden_dropout="dropout"),  # T5 v1.1
    "e0e7072bcbacdc94": MLPSpec("wi_0", "wo", "act", gate="wi_1", hidden_dropout="dropout"),  # LongT5
}
"""By the digest of the forward's text."""

PARTS = {
    "97dd86d151bc78a8": MLPSpec("lin1", "lin2", "activation", output_dropout="dropout"),  # DistilBERT's ff_chunk
}
"""The same for modules whose method ``ff_chunk`` does the work."""

_PAIR = MLPSpec("intermediate.dense", "output.dense", "intermediate.intermediate_act_fn")
_PAIR_TEXTS = ("9d762413d88003c8", "24c8661c5a564096", "4086a03d6f9ac22a")
"""Of ``feed_forward_chunk``, and of the forwards of ``intermediate`` and ``output``, in BERT and those like it."""

ACTIVATION_NAMES = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
"""Names of the operator by those of Transformers."""


class _Fused(Block):
    """The base class of feed-forward blocks."""

    title = "a tiled MLP"
    spec: ClassVar[MLPSpec]

    def fused_layers(self) -> list[TTLinear]:
        """The layers into the hidden layer and out of it."""
        spec = self.spec
        names = [spec.inner, spec.outer, *([spec.gate] if spec.gate not in (None, spec.inner) else [])]
        return [_found(self, name) for name in names]

    def refusal(self) -> str | None:
        """Why the module's own forward runs, or None if the block does."""
        spec = self.spec
        if reason := layer_refusal(self.fused_layers()):
            return reason
        function = _found(self, spec.activation)
        if _activation_name(function) is None:
            return f"its activation {_named(function)} is none of {', '.join(sorted(set(ACTIVATION_NAMES)))}"
        if is_watched(function):
            return "a hook watches its activation"
        dropout = _found(self, spec.hidden_dropout) if spec.hidden_dropout else None
        if dropout is not None and (is_watched(dropout) or type(dropout) not in (nn.Dropout, FastDropout)):
            return f"its hidden dropout is a {type(dropout).__name__}, or a hook watches it"
        return None

    def outer_output(self, x: Tensor) -> Tensor:
        """The output of the outer layer for the block's input.

        Shape:
            ``(..., in features of inner) -> (..., out features of outer)``.
        """
        spec, dtype = self.spec, autocast_dtype(x)
        inner, outer = _found(self, spec.inner), _found(self, spec.outer)
        with without_autocast(x):
            rows = x.reshape(-1, x.shape[-1]).to(dtype)
            layers = [inner] if spec.gate in (None, spec.inner) else [inner, _found(self, spec.gate)]
            lefts, rights = zip(*(layer.halves(dtype) for layer in layers), strict=True)
            joint = nn.functional.linear(rows, torch.cat(lefts) if len(lefts) > 1 else lefts[0])  # one pass over rows
            latents = joint.split([left.shape[0] for left in lefts], dim=-1)
            maps: list[Any] = [layer.hidden_input(*pair) for layer, *pair in zip(layers, latents, rights, strict=True)]
            if spec.gate == spec.inner:
                half = inner.out_features // 2
                maps = [_columns(maps[0], slice(0, half)), _columns(maps[0], slice(half, None))]
            left, right = outer.halves(dtype)
            bits, share = self._drawn(rows, left)
            name = str(_activation_name(_found(self, spec.activation)))
            gate = maps[1] if len(maps) > 1 else None
            latent = tiled_mlp(maps[0], left, activation=name, gate=gate, bits=bits, share=share)
            return outer.from_latent(latent, right).view(*x.shape[:-1], outer.out_features)

    def _drawn(self, rows: Tensor, left: Tensor) -> tuple[Tensor | None, float]:
        """The bits of entries of the hidden layer that dropout keeps, and their share."""
        dropout = _found(self, self.spec.hidden_dropout) if self.spec.hidden_dropout else None
        if dropout is None or not dropout.training or dropout.p == 0:
            return None, 1.0
        bits = bit_dropout.draw_kept((len(rows), left.shape[1]), dropout.p, rows.device)
        return bits, bit_dropout.kept_share(dropout.p)


class TiledMLP(_Fused):
    """A module that is a feed-forward block."""

    @classmethod
    def row(cls, own_class: type[nn.Module]) -> MLPSpec | None:
        """The row of this forward."""
        return FORWARDS.get(text_digest(own_class.forward) or "")

    def forward(self, x: Tensor) -> Tensor:
        """As the module's own forward."""
        if self.refusal() is not None:
            return super().forward(x)
        y = self.outer_output(x)
        return y if self.spec.output_dropout is None else _found(self, self.spec.output_dropout)(y)


class TiledChunk(_Fused):
    """DistilBERT's: its forward calls ``ff_chunk``."""

    @classmethod
    def row(cls, own_class: type[nn.Module]) -> MLPSpec | None:
        """The row of this method."""
        return PARTS.get(text_digest(getattr(own_class, "ff_chunk", None)) or "")

    def ff_chunk(self, x: Tensor) -> Tensor:
        """As the module's own method."""
        if self.refusal() is not None:
            return super().ff_chunk(x)  # type: ignore[misc]
        return _found(self, self.spec.output_dropout)(self.outer_output(x))


class TiledLayer(_Fused):
    """A layer with ``intermediate`` and ``output``, as BERT's: the method ``feed_forward_chunk``."""

    @classmethod
    def row(cls, own_class: type[nn.Module]) -> MLPSpec | None:
        """The row of this method."""
        return _PAIR if text_digest(getattr(own_class, "feed_forward_chunk", None)) == _PAIR_TEXTS[0] else None

    def refusal(self) -> str | None:
        """Why the module's own forward runs, or None if the block does."""
        if is_watched(self.intermediate) or is_watched(self.output):
            return "a hook watches its intermediate or output module"
        return super().refusal()

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """As the module's own method."""
        if self.refusal() is not None:
            return super().feed_forward_chunk(attention_output)  # type: ignore[misc]
        output = self.output
        return output.LayerNorm(output.dropout(self.outer_output(attention_output)) + attention_output)


def mlp_block(module: nn.Module) -> type[Block] | None:
    """The block for ``module``, or None if its forward is not in the table."""
    own_class: Any = type(module)
    for block in (TiledMLP, TiledChunk):
        if block.row(own_class) is not None:
            return block
    if TiledLayer.row(own_class) is None:
        return None
    children = (type(module.get_submodule(name)).forward for name in ("intermediate", "output"))
    return TiledLayer if tuple(map(text_digest, children)) == _PAIR_TEXTS[1:] else None


def _columns(part: HiddenInput, chunk: slice) -> HiddenInput:
    return HiddenInput(part.latent, part.right[:, chunk], None if part.bias is None else part.bias[chunk])


def _found(module: Any, name: str | None) -> Any:
    for part in str(name).split("."):
        module = getattr(module, part)
    return module


def _activation_name(function: Any) -> str | None:
    return _NAME_BY_TYPE.get(type(function)) or _NAME_BY_FUNCTION.get(function)


_NAME_BY_TYPE = {type(ACT2FN[name]): ours for name, ours in ACTIVATION_NAMES.items()}
_NAME_BY_FUNCTION = {nn.functional.gelu: "gelu", nn.functional.relu: "relu", nn.functional.silu: "silu"}


def _named(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
