"""A call of every kernel on small inputs, for claims that hold for each of them."""

import torch

from hf_comera.ops.cuda.halves import Half, tt_halves, tt_halves_backward
from hf_comera.ops.cuda.low_rank_linear import low_rank_linear, low_rank_linear_backward
from hf_comera.ops.cuda.tiled_mlp import tiled_mlp, tiled_mlp_backward
from hf_comera.ops.cuda.ttm_embedding import ttm_rows, ttm_table_gradients
from tests.kernels.test_coat_adamw import new_parameter, step_by_kernel


def linear(dtype):
    x, left, right, grad_y = (torch.randn(shape).to(dtype) for shape in ((70, 200), (72, 200), (72, 136), (70, 136)))

    def call():
        y, code = low_rank_linear(x, left, right, None)
        return [y, code, *low_rank_linear_backward(grad_y, None, x, code, left, right)]

    return call


def wide(dtype):
    make = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
    codes, rights = [make(70, 32), make(70, 24)], [make(32, 600), make(24, 600)]
    operands = (codes, rights, [make(600), make(600)], [torch.rand(70, 600) < 0.8], make(16, 600))
    grad, form = make(70, 16), {"activation": "gelu", "scale": 1.25}
    return lambda: [tiled_mlp(*operands, **form), *tiled_mlp_backward(grad, *operands, **form)]


def halves(dtype):
    cores = [torch.randn(shape).to(dtype) for shape in ((1, 6, 5), (5, 4, 9), (9, 3, 7), (7, 2, 10))]
    backwards = [core.permute(2, 1, 0).contiguous() for core in reversed(cores)]
    gates = [torch.rand(rank) for rank in (5, 9, 7, 10)]
    sides = [Half(cores, True, 140, 16, gates), Half(backwards, False, 144, 16)]
    grads = [torch.randn(16, side.features) for side in sides]

    def call():
        found = tt_halves_backward(sides, grads)
        return [*tt_halves(sides, dtype), *(each for of_side in found for each in of_side)]

    return call


def lookup(dtype):
    left, right, ids = torch.randn(9, 6, 8), torch.randn(20, 8, 7), torch.randint(0, 180, (300,))
    grad = torch.randn(300, 42)
    return lambda: [ttm_rows(ids, left, right, 180, 42, dtype), *ttm_table_gradients(grad, ids, left, right, 180)]


def coat(dtype):
    parameters = [new_parameter(shape, dtype) for shape in ((5, 300), (20, 12), (1, 400))]

    def call():
        step_by_kernel(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
        return [tensor for parameter in parameters for tensor in parameter if isinstance(tensor, torch.Tensor)]

    return call


CALLS = [linear, wide, halves, lookup, coat]
"""Each makes its inputs in a dtype and gives the call, which returns all results."""
