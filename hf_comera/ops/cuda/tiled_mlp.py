"""Calls of the CUDA kernels from latents to the latent after a hidden layer, which never leaves the chip.

Precisions are those of ``ops/cuda/low_rank_linear.py``. CPU tensors go to the emulated kernels, which are for tests.
"""

# Shapes here: T = tokens, H = hidden features, R = rank in front, S = rank behind; ranks are multiples of 8.

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.cuda.dispatch import check_taken, place_refusal
from hf_comera.ops.cuda.library import check_status, current_stream, kernel_library, on_device, pointers
from hf_comera.ops.cuda.low_rank_linear import kernel_precision

__all__ = ["MAX_RANK", "tiled_mlp", "tiled_mlp_backward", "tiled_mlp_refusal", "wide_operand_refusal"]

ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}  # the numbers of kernels/activations.h
MAX_RANK = 64
VECTOR = 8  # numbers that hidden features come in
VECTOR_BYTES = 16


def wide_operand_refusal(half: Tensor) -> str | None:
    """Why the kernels cannot take a half of a layer, or None where they can; all others must be like it.

    Shape:
        half ``(R, H)``, or the other half of that layer: only the first axis matters.
    """
    rank = half.shape[0]
    if half.dtype not in (torch.bfloat16, torch.float32):
        return f"the kernels take torch.bfloat16 and torch.float32, not {half.dtype}"
    if rank % 8 or not 8 <= rank <= MAX_RANK:
        return f"the kernels take ranks 8, 16, ..., {MAX_RANK}, not {rank}"
    return place_refusal(half)


def tiled_mlp_refusal(
    latents: Sequence[Tensor],
    rights: Sequence[Tensor],
    masks: Sequence[Tensor],
    left: Tensor,
    *,
    activation: str,
    scale: float | None,
) -> str | None:
    """Why the kernels cannot take these tensors, or None where they can.

    Shape:
        As :func:`tiled_mlp`.
    """
    if activation not in ACTIVATIONS:
        return f"the kernels take {', '.join(ACTIVATIONS)}, not {activation}"
    if len(latents) > 2:
        return f"there is no kernel for {len(latents)} inputs"
    if [mask.dtype for mask in masks] != ([] if scale is None else [torch.bool]):
        return f"scale={scale} needs one boolean mask where there is a scale, and none else"
    tensors = [left, *latents, *rights]
    if len({tensor.dtype for tensor in tensors}) > 1:
        return f"the dtypes differ: {', '.join(str(tensor.dtype) for tensor in tensors)}"
    wide_shape = (latents[0].shape[0], left.shape[1])
    for latent, right in zip(latents, rights, strict=True):
        if latent.shape != (wide_shape[0], right.shape[0]) or right.shape[1] != wide_shape[1]:
            return f"shapes do not fit: {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}"
    if any(mask.shape != wide_shape for mask in masks):
        return f"the mask has shape {tuple(masks[0].shape)}, the hidden layer {wide_shape}"
    refusals = (place_refusal(*tensors, *masks), *map(wide_operand_refusal, (left, *rights)))
    return next(filter(None, refusals), None)


def tiled_mlp(
    latents: Sequence[Tensor],
    rights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    masks: Sequence[Tensor],
    left: Tensor,
    *,
    activation: str,
    scale: float | None,
) -> Tensor:
    """``(act(code_1 @ right_1 + bias_1) [* (code_2 @ right_2 + bias_2)] [* mask * scale]) @ left.T`` in one launch.

    Args:
        latents: Of the input that is activated, and of the gate, if there is one.
        rights: Their right halves.
        biases: Theirs.
        masks: What dropout keeps, if there is dropout.
        left: Left half of the layer behind.
        activation: A name in :data:`ACTIVATIONS`.
        scale: Of what dropout keeps; None without dropout.

    Shape:
        latents ``(T, R)``, rights ``(R, H)``, biases ``(H,)`` or None, mask ``(T, H)``, left ``(S, H)`` -> ``(T, S)``,
        in the dtype of ``left``.

    Raises:
        NoKernelError: If the kernels cannot take the tensors; ``tiled_mlp_refusal`` says so beforehand.
    """
    call = _Call(latents, rights, biases, masks, left, activation=activation, scale=scale)
    latent_TS = left.new_empty(call.num_tokens, left.shape[0])
    call.run("hf_comera_tiled_mlp", activation, latent_TS)
    return latent_TS


def tiled_mlp_backward(
    grad_TS: Tensor,
    latents: Sequence[Tensor],
    rights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    masks: Sequence[Tensor],
    left: Tensor,
    *,
    activation: str,
    scale: float | None,
) -> list[Tensor]:
    """Gradients of all that is as wide as the hidden layer, then of the latents; the same bits each time.

    Shape:
        grad_TS ``(T, S)`` -> rows ``(sum of R + S + inputs, H)`` in float32: those of the rights, of ``left``, of the
        biases, also where there is none; then ``(T, R)`` for each latent, in its dtype.

    Raises:
        NoKernelError: If the kernels cannot take the tensors.
    """
    call = _Call(latents, rights, biases, masks, left, activation=activation, scale=scale)
    dlatents = [latent.new_empty(*latent.shape) for latent in latents]
    num_rows = sum(right.shape[0] for right in rights) + left.shape[0] + len(rights)
    wide = left.new_empty(num_rows, call.hidden, dtype=torch.float32)
    num_chunks = call.library.hf_comera_tiled_mlp_chunks(call.num_tokens, call.hidden)
    partials = wide.new_empty(num_chunks, wide.numel())
    grad_TS = _for_vectors(grad_TS.to(left.dtype))
    gate = dlatents[1] if len(dlatents) > 1 else None
    call.run("hf_comera_tiled_mlp_backward", activation, grad_TS, dlatents[0], gate, wide, partials)
    return [wide[:, : left.shape[1]], *dlatents]


class _Call:
    """The operands as the kernels want them: rows of whole vectors."""

    def __init__(
        self,
        latents: Sequence[Tensor],
        rights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        masks: Sequence[Tensor],
        left: Tensor,
        *,
        activation: str,
        scale: float | None,
    ) -> None:
        refusal = tiled_mlp_refusal(latents, rights, masks, left, activation=activation, scale=scale)
        check_taken("tiled_mlp", refusal)
        self.num_tokens, self.hidden = latents[0].shape[0], -(-left.shape[1] // VECTOR) * VECTOR
        self.library, self.device, self.precision = kernel_library(left.device), left.device, kernel_precision(left)
        self.scale = scale or 1.0
        self.tensors: list[Tensor | None] = []
        for latent, right, bias in zip(latents, rights, biases, strict=True):
            padded_bias = None if bias is None else self._padded(bias.to(left.dtype))
            self.tensors += [_for_vectors(latent), self._padded(right), padded_bias]
        self.tensors += [None] * (6 - len(self.tensors))
        self.tensors += [self._padded(left), self._padded(masks[0]) if masks else None]
        self.ranks = [*(right.shape[0] for right in rights), *[0] * (2 - len(rights)), left.shape[0]]

    def _padded(self, tensor: Tensor) -> Tensor:
        """Zeros behind hidden features whose number is none of whole vectors: they add nothing."""
        lacking = self.hidden - tensor.shape[-1]
        return _for_vectors(pad(tensor, (0, lacking)) if lacking else tensor)

    def run(self, function: str, activation: str, *results: Tensor | None) -> None:
        """Launch with the operands and what else the function takes."""
        addresses = pointers(*self.tensors, *results)
        sizes = (self.num_tokens, self.hidden, *self.ranks)
        with on_device(self.device):
            status = getattr(self.library, function)(
                *(self.precision, *addresses, *sizes, ACTIVATIONS[activation], self.scale),
                current_stream(self.device),
            )
        check_status(self.library, status, function.removeprefix("hf_comera_"))


def _for_vectors(tensor: Tensor) -> Tensor:
    """The same numbers one after the other, from a multiple of 16 bytes on."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor
