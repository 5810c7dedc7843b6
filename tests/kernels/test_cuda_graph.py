"""hf_comera/ops/cuda/: calls can be captured in a CUDA graph and replayed on new numbers."""

import pytest
import torch

from hf_comera.ops.cuda.halves import Half, tt_halves, tt_halves_backward
from hf_comera.ops.cuda.low_rank_linear import low_rank_linear, low_rank_linear_backward
from hf_comera.ops.cuda.tiled_mlp import tiled_mlp, tiled_mlp_backward
from hf_comera.ops.cuda.ttm_embedding import ttm_rows, ttm_table_gradients
from tests.kernels.test_coat_adamw import new_parameter, step_by_kernel

STATE = ("first", "first_scales", "second", "second_scales")


def adamw_step(kept, gradient, rate):
    """Value and state of a copy of ``kept`` after a step."""
    stepped = kept._replace(gradient=gradient, **{name: getattr(kept, name).clone() for name in ("value", *STATE)})
    step_by_kernel([stepped], lr=rate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    return [stepped.value, *(getattr(stepped, name) for name in STATE)]


@pytest.mark.gpu
def test_every_call_can_be_captured():
    make = lambda *shape: torch.randn(shape, device="cuda")  # noqa: E731
    x, left, right, grad_y = make(70, 64), make(32, 64), make(32, 96), make(70, 96)
    left_out, grad_latent, form = make(16, 96), make(70, 16), {"activation": "gelu", "scale": None}
    table_left, table_right, ids = make(4, 6, 8), make(5, 8, 7), torch.randint(0, 20, (70,), device="cuda")
    side = [Half([make(1, 4, 6), make(6, 5, 8)], True, 20, 8, [make(6), make(8)])]

    kept, rate = new_parameter((70, 64), torch.float32, "cuda"), torch.tensor(1e-3, device="cuda")

    def compute():
        y, code = low_rank_linear(x, left, right)
        gradients = low_rank_linear_backward(grad_y, None, x, code, left, right)
        wide = [code], [right], [None], [], left_out
        rows = ttm_rows(ids, table_left, table_right, 20, 42, torch.float32)
        return [
            y,
            code,
            *gradients,
            tiled_mlp(*wide, **form),
            *tiled_mlp_backward(grad_latent, *wide, **form),
            rows,
            *ttm_table_gradients(rows, ids, table_left, table_right, 20),
            *(halves := tt_halves(side, torch.float32)),
            *tt_halves_backward(side, halves)[0],
            *adamw_step(kept, x, rate),
        ]

    def change():
        x.copy_(make(70, 64))
        side[0].cores[1].copy_(make(6, 5, 8))
        ids.copy_(torch.randint(0, 20, (70,), device="cuda"))

    assert_replays_follow(compute, change)


def assert_replays_follow(compute, change):
    """A graph of ``compute``, replayed after ``change``, gives what ``compute`` itself gives then."""
    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    change()
    graph.replay()
    for replayed, fresh in zip(captured, compute(), strict=True):
        assert torch.equal(replayed, fresh)
