"""Calls of the CUDA kernels from codes to the code behind a hidden layer, which never leaves the chip.

Precisions are those of ``low_rank_kernels.py``. CPU tensors go to the emulated kernels, which are for tests.
"""

# Shapes here: T = tokens, H = hidden features, R = rank in front, S = rank behind; ranks are multiples of 8.

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_comera.ops.kernel_calls import current_stream, on_device, pointers
from hf_comera.ops.kernels import check_status, kernel_library, kernels_refusal
from hf_comera.ops.low_rank_kernels import kernel_precision
from hf_comera.ops.wide_input import WideForm, WideInput

__all__ = [
    "MAX_RANK",
    "WIDE_ACTIVATIONS",
    "wide_code",
    "wide_code_backward",
    "wide_code_refusal",
    "wide_operand_refusal",
]

WIDE_ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4}  # the numbers of kernels/activations.h
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
    if half.device.type not in ("cpu", "cuda"):
        return f"the kernels run on CUDA devices, not on {half.device}"
    return kernels_refusal(half.device) if half.device.type == "cuda" else None


def wide_code_refusal(
    inputs: Sequence[WideInput], form: WideForm | None, masks: Sequence[Tensor], left: Tensor
) -> str | None:
    """Why the kernels cannot take these tensors, or None where they can.

    Shape:
        As :func:`wide_code`.
    """
    if form is None:
        return f"the nonlinearity is none of {', '.join(WIDE_ACTIVATIONS)}, gated or not"
    if form.activation not in WIDE_ACTIVATIONS or sorted(form.order) != list(range(len(inputs))) or len(inputs) > 2:
        return f"there is no kernel for {form} with {len(inputs)} inputs"
    if [mask.dtype for mask in masks] != ([] if form.scale is None else [torch.bool]):
        return f"{form} needs one boolean mask where there is a scale, and none else"
    tensors = [left, *(tensor for part in inputs for tensor in part[:2])]
    if len({tensor.dtype for tensor in tensors}) > 1:
        return f"the dtypes differ: {', '.join(str(tensor.dtype) for tensor in tensors)}"
    if len({tensor.device for tensor in (*tensors, *masks)}) > 1:
        return f"the devices differ: {', '.join(str(tensor.device) for tensor in (*tensors, *masks))}"
    wide_shape = (inputs[0].code.shape[0], left.shape[1])
    for part in inputs:
        if part.code.shape != (wide_shape[0], part.right.shape[0]) or part.right.shape[1] != wide_shape[1]:
            return f"shapes do not fit: {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}"
    if any(mask.shape != wide_shape for mask in masks):
        return f"the mask has shape {tuple(masks[0].shape)}, the hidden layer {wide_shape}"
    return next(filter(None, map(wide_operand_refusal, (left, *(part.right for part in inputs)))), None)


def wide_code(inputs: Sequence[WideInput], form: WideForm, masks: Sequence[Tensor], left: Tensor) -> Tensor:
    """``(act(code_1 @ right_1 + bias_1) [* (code_2 @ right_2 + bias_2)] [* mask * scale]) @ left.T`` in one launch.

    Args:
        inputs: The linear maps into the hidden layer.
        form: The nonlinearity.
        masks: What dropout keeps, if there is dropout.
        left: Left half of the layer behind.

    Shape:
        codes ``(T, R)``, rights ``(R, H)``, biases ``(H,)`` or None, mask ``(T, H)``, left ``(S, H)`` -> ``(T, S)``,
        in the dtype of ``left``.

    Raises:
        ValueError: If the kernels cannot take the tensors; ``wide_code_refusal`` says so beforehand.
    """
    call = _Call(inputs, form, masks, left)
    code_TS = left.new_empty(call.num_tokens, left.shape[0])
    call.run("hf_comera_wide_code", code_TS)
    return code_TS


def wide_code_backward(
    grad_TS: Tensor, inputs: Sequence[WideInput], form: WideForm, masks: Sequence[Tensor], left: Tensor
) -> list[Tensor | None]:
    """Gradients of ``left``, then of code, right and bias of each input; the same bits each time.

    Shape:
        grad_TS ``(T, S)``; gradients as what they belong to, those of codes in its dtype, all others in float32.

    Raises:
        ValueError: If the kernels cannot take the tensors.
    """
    call = _Call(inputs, form, masks, left)
    hidden, ranks = call.hidden, [part.right.shape[0] for part in call.parts]
    dcodes = [part.code.new_empty(call.num_tokens, rank) for part, rank in zip(call.parts, ranks, strict=True)]
    sizes = [rank * hidden for rank in (*ranks, left.shape[0])] + [hidden] * len(ranks)
    flat = left.new_empty(sum(sizes), dtype=torch.float32)
    num_chunks = call.library.hf_comera_wide_code_chunks(call.num_tokens, hidden)
    partials = flat.new_empty(num_chunks, flat.numel())
    grad_TS = _for_vectors(grad_TS.to(left.dtype))
    call.run(
        "hf_comera_wide_code_backward", grad_TS, dcodes[0], dcodes[1] if len(dcodes) > 1 else None, flat, partials
    )
    wides = [grad.view(-1, hidden)[:, : left.shape[1]] for grad in flat.split(sizes)]
    found: list[Tensor | None] = [wides[len(ranks)]]
    for place in map(form.order.index, range(len(inputs))):
        dbias = None if call.parts[place].bias is None else wides[len(ranks) + 1 + place].view(-1)
        found += [dcodes[place], wides[place], dbias]
    return found


class _Call:
    """The operands as the kernels want them: inputs in the order of the form, rows of whole vectors."""

    def __init__(self, inputs: Sequence[WideInput], form: WideForm, masks: Sequence[Tensor], left: Tensor) -> None:
        if reason := wide_code_refusal(inputs, form, masks, left):
            raise ValueError(f"wide_code has no kernel for this: {reason}.")
        self.form, self.parts = form, [inputs[place] for place in form.order]
        self.num_tokens, self.hidden = inputs[0].code.shape[0], -(-left.shape[1] // VECTOR) * VECTOR
        self.library, self.device, self.precision = kernel_library(left.device), left.device, kernel_precision(left)
        self.tensors: list[Tensor | None] = []
        for part in self.parts:
            bias = None if part.bias is None else self._padded(part.bias.to(left.dtype))
            self.tensors += [_for_vectors(part.code), self._padded(part.right), bias]
        self.tensors += [None] * (6 - len(self.tensors))
        self.tensors += [self._padded(left), self._padded(masks[0]) if masks else None]
        self.ranks = [*(part.right.shape[0] for part in self.parts), *[0] * (2 - len(self.parts)), left.shape[0]]

    def _padded(self, tensor: Tensor) -> Tensor:
        """Zeros behind hidden features whose number is none of whole vectors: they add nothing."""
        lacking = self.hidden - tensor.shape[-1]
        return _for_vectors(pad(tensor, (0, lacking)) if lacking else tensor)

    def run(self, function: str, *results: Tensor | None) -> None:
        """Launch with the operands and what else the function takes."""
        addresses = pointers(*self.tensors, *results)
        sizes = (self.num_tokens, self.hidden, *self.ranks)
        number, scale = WIDE_ACTIVATIONS[self.form.activation], self.form.scale or 1.0
        with on_device(self.device):
            status = getattr(self.library, function)(
                self.precision, *addresses, *sizes, number, scale, current_stream(self.device)
            )
        check_status(self.library, status, function.removeprefix("hf_comera_"))


def _for_vectors(tensor: Tensor) -> Tensor:
    """The same numbers one after the other, from a multiple of 16 bytes on."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % VECTOR_BYTES else tensor
