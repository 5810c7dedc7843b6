"""benchmarks/kernels/roofline.py: floors follow the larger of bytes and arithmetic, as they are computed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.kernels.candidates import CHAIN_OPS, TORCH
from benchmarks.kernels.roofline import WORK, Ceilings, Work, measure_ceilings
from benchmarks.kernels.run import PRODUCT_OPS
from hf_comera.ops.cuda import switch

CPU = torch.device("cpu")


def test_every_case_has_a_floor():
    assert WORK.keys() == PRODUCT_OPS.keys() | CHAIN_OPS.keys()


@pytest.mark.parametrize(
    ("work", "name", "seconds"),
    [
        (Work(1000, 10), "bf16", 10.0),
        (Work(100, 10_000), "bf16", 5.0),
        (Work(100, 10_000), "fp32", 50.0),
        (Work(100, 10_000, in_float32=True), "bf16", 50.0),
    ],
)
def test_a_floor_is_the_larger_of_two(work, name, seconds):
    assert Ceilings(100.0, {"bf16": 2000.0, "fp32": 200.0}).seconds(work, name) == seconds


@pytest.mark.parametrize("shape", [(40, 64, 96, 16), (7, 24, 24, 3)])
@pytest.mark.parametrize(("op", "remade"), [("forward", 0), ("backward", 0), ("ffn forward", 0), ("ffn backward", 1)])
def test_products_are_counted_as_torch_counts_them(op, remade, shape):
    candidates = PRODUCT_OPS[op](shape, torch.float64, CPU)
    with FlopCounterMode(display=False) as counter:
        candidates[TORCH]()
    tokens, _, hidden, rank = shape
    again = remade * 2 * tokens * hidden * rank  # torch keeps the hidden layer
    assert WORK[op](shape, 8).flops == counter.get_total_flops() + again


@pytest.mark.parametrize("op", CHAIN_OPS)
def test_chains_are_counted_as_torch_counts_them(op, monkeypatch):
    monkeypatch.setattr(switch, "_wanted", False)
    shape = CHAIN_OPS[op][3][0]
    candidates = CHAIN_OPS[op][1](shape, torch.float32, CPU)
    with FlopCounterMode(display=False) as counter:
        candidates[TORCH]()
    counted = counter.get_total_flops()
    if "lookup" in op:  # torch makes distinct rows alone
        assert counted < WORK[op](shape, 4).flops
    else:  # torch pads what it stacks, and makes no gradient of what has none
        assert 0.5 * counted < WORK[op](shape, 4).flops < 2 * counted


def test_bytes_of_a_linear_layer():
    tokens, num_in, num_out, rank = shape = (40, 64, 96, 16)
    x, y, code = tokens * num_in, tokens * num_out, tokens * rank
    factors = rank * (num_in + num_out)
    assert WORK["forward"](shape, 2).num_bytes == 2 * (x + factors + num_out + y + code)
    assert WORK["backward"](shape, 2).num_bytes == 2 * (y + x + code + factors + x + factors + num_out)
    with_gradients = WORK["halves and gradients"]((2, 64, 96, 16), 2).num_bytes
    assert with_gradients == 2 * WORK["halves"]((2, 64, 96, 16), 2).num_bytes


def test_ceilings_are_measured():
    ceilings = measure_ceilings(CPU, rounds=1, size=32)
    assert ceilings.bytes_per_s > 0
    assert min(ceilings.flops_per_s.values()) > 0
    assert ceilings.flops_per_s.keys() == {"bf16", "fp32", "tf32"}
    assert torch.get_float32_matmul_precision() == "highest"
