"""kernels/tiled_mlp*.cu: as exact as the same steps in plain torch, whose hidden layer is written out."""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from hf_comera.ops.cuda.tiled_mlp import ACTIVATIONS, tiled_mlp, tiled_mlp_backward
from hf_comera.ops.tiled_mlp import HiddenInput
from tests.kernels.kernel_errors import DTYPES, assert_as_exact, between_nans, precision, product

TORCH_ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": lambda z: gelu(z, approximate="tanh"),
    "relu": relu,
    "silu": silu,
}
# tokens, hidden features, ranks in front, rank behind, activation, dropout, bias
SHAPES = [
    (40, 320, (32,), 32, "gelu", 0.0, True),
    (33, 128, (64, 64), 24, "silu", 0.0, False),
    (300, 96, (16,), 8, "gelu_tanh", 0.2, True),  # several chunks of tokens
    (2, 45, (8,), 16, "relu", 0.0, True),
    (5, 72, (16, 40), 56, "gelu_tanh", 0.5, True),
    (47, 200, (24, 8), 64, "gelu", 0.3, True),
    (70, 13, (40,), 32, "silu", 0.1, False),
    (19, 64, (8, 8), 8, "relu", 0.0, True),
]
EMPTY = (0, 48, (32, 16), 32, "gelu", 0.1, True)


class Form(NamedTuple):
    """The nonlinearity, and the scale of what dropout keeps."""

    activation: str
    scale: float | None


def operands(shape, dtype, device):
    num_tokens, hidden, ranks, rank_out, activation, dropout, has_bias = shape
    make = lambda *sizes: torch.randn(sizes).to(device, dtype)  # noqa: E731
    inputs = [
        HiddenInput(make(num_tokens, rank), make(rank, hidden) / rank**0.5, make(hidden) if has_bias else None)
        for rank in ranks
    ]
    masks = [(torch.rand(num_tokens, hidden) >= dropout).to(device)] if dropout else []
    form = Form(activation, 1 / (1 - dropout) if dropout else None)
    return inputs, form, masks, make(rank_out, hidden) / hidden**0.5


def changed(change, inputs, left):
    """Inputs and left half with a function applied to all their tensors."""
    return [HiddenInput(*(None if each is None else change(each) for each in part)) for part in inputs], change(left)


def steps(matmul, inputs, form, masks, left, grad):
    """The latent of the output; the gradients of left, then of latent, right and bias of each input, one by one."""
    wides = [matmul(part.latent, part.right) + (0 if part.bias is None else part.bias) for part in inputs]
    leaves = [wide.detach().requires_grad_() for wide in wides]
    hidden = TORCH_ACTIVATIONS[form.activation](leaves[0])
    for gate in leaves[1:]:
        hidden = hidden * gate
    for mask in masks:
        hidden = hidden * mask * form.scale
    dwides = torch.autograd.grad(hidden, leaves, matmul(grad, left))
    hidden, found = hidden.detach(), [matmul(grad.T, hidden.detach())]
    for part, dwide in zip(inputs, dwides, strict=True):
        found += [matmul(dwide, part.right.T), matmul(part.latent.T, dwide)]
        found += [] if part.bias is None else [dwide.sum(0)]
    return [matmul(hidden, left.T), *found]


def kernel(inputs, form, masks, left, grad):
    """As :func:`steps`; of what the kernel makes for a bias that is none, nothing."""
    columns = [list(column) for column in zip(*inputs, strict=True)]
    wide, *dlatents = tiled_mlp_backward(grad, *columns, masks, left, **form._asdict())
    ranks, count = [part.right.shape[0] for part in inputs], len(inputs)
    rows = wide.split([*ranks, left.shape[0], *[1] * count])
    found = [rows[count]]
    for place, part in enumerate(inputs):
        found += [dlatents[place], rows[place], *([] if part.bias is None else [rows[count + 1 + place][0]])]
    return [tiled_mlp(*columns, masks, left, **form._asdict()), *found]


def one_draw(name, shape, device):
    """Results of the kernels, of plain torch and in float64."""
    inputs, form, masks, left = operands(shape, DTYPES[name], device)
    grad = torch.randn(shape[0], left.shape[0]).to(device, DTYPES[name])
    guarded, guarded_left = changed(between_nans, inputs, left)
    with precision(name):
        found = kernel(guarded, form, masks, guarded_left, between_nans(grad))
    plain = steps(lambda a, b: product(name, a, b), inputs, form, masks, left, grad)
    inputs, left = changed(torch.Tensor.double, inputs, left)
    return found, plain, steps(torch.matmul, inputs, form, masks, left, grad.double())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_torch(shape, name, kernels):
    num_draws = 1 if shape[0] > 8 else 16  # errors of a few numbers are more chance than anything
    draws = [one_draw(name, shape, kernels) for _ in range(num_draws)]
    found, plain, exact = (
        [torch.stack(parts) for parts in zip(*kind, strict=True)] for kind in zip(*draws, strict=True)
    )
    latents = [0, *range(2, len(found), 2 + shape[-1])]
    for place, (mine, torchs, wanted) in enumerate(zip(found, plain, exact, strict=True)):
        assert mine.dtype == (DTYPES[name] if place in latents else torch.float32)
        assert_as_exact(name, mine, torchs, wanted)


@pytest.mark.parametrize("form", list(itertools.product(ACTIVATIONS, (1, 2), (0.0, 0.4))), ids=str)
def test_every_form(form, kernels):
    activation, num_inputs, dropout = form
    found, plain, exact = one_draw("fp32", (32, 96, (32, 24)[:num_inputs], 16, activation, dropout, True), kernels)
    for mine, torchs, wanted in zip(found, plain, exact, strict=True):
        assert_as_exact("fp32", mine, torchs, wanted)


def test_no_tokens_give_zeros(kernels):
    inputs, form, masks, left = operands(EMPTY, torch.float32, kernels)
    latent, dleft, *grads = kernel(inputs, form, masks, left, torch.empty(0, 32, device=kernels))
    assert latent.shape == (0, 32)
    assert [tuple(grad.shape) for grad in grads] == [(0, 32), (32, 48), (48,), (0, 16), (16, 48), (48,)]
    assert not any(grad.any() for grad in (dleft, *grads))


def test_a_tensor_may_start_anywhere(kernels):
    shift = lambda each: each.new_empty(each.numel() + 1)[1:].view_as(each).copy_(each)  # noqa: E731
    inputs, form, masks, left = operands(SHAPES[5], torch.bfloat16, kernels)
    grad = torch.randn(47, 64, device=kernels).bfloat16()
    shifted, shifted_left = changed(shift, inputs, left)
    found = kernel(shifted, form, [shift(mask) for mask in masks], shifted_left, shift(grad))
    for one, other in zip(found, kernel(inputs, form, masks, left, grad), strict=True):
        assert torch.equal(one, other)


def test_nothing_but_the_results_is_written(kernels, monkeypatch):
    inputs, form, masks, left = operands(SHAPES[5], torch.bfloat16, kernels)
    buffers, allocate = [], torch.Tensor.new_empty

    def new_empty(self, *shape, dtype=None):
        size = torch.Size(shape).numel()
        buffers.append(allocate(self, size + 256, dtype=dtype or self.dtype).fill_(7))
        return buffers[-1][128 : 128 + size].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    kernel(inputs, form, masks, left, torch.randn(47, 64, device=kernels))
    monkeypatch.undo()
    assert len(buffers) == 5
    for buffer in buffers:
        assert (buffer[:128] == 7).all()
        assert (buffer[-128:] == 7).all()


def test_every_activation_is_tested():
    assert set(TORCH_ACTIVATIONS) == set(ACTIVATIONS)
