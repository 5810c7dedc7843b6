"""kernels/emulation.h: no warnings; missed barriers are told; no result depends on which threads run first."""

import shutil
import subprocess

import pytest
import torch

from hf_comera.ops.coat_kernels import coat_adamw_step
from hf_comera.ops.halves_kernels import Half, tt_halves, tt_halves_backward
from hf_comera.ops.kernel_build import build_emulated_library, sources_folder
from hf_comera.ops.low_rank_kernels import low_rank_linear, low_rank_linear_backward
from hf_comera.ops.ttm_kernels import ttm_rows, ttm_table_gradients
from hf_comera.ops.wide_code_kernels import wide_code, wide_code_backward
from hf_comera.ops.wide_input import WideForm, WideInput
from tests.kernels.test_coat_adamw import new_parameter

MISSED_BARRIER = """
#include "portable.h"
struct Nothing {};
KERNEL kernel(Nothing) {
  if (threadIdx.x == 3) return;
  __syncthreads();
}
int main() { return launch(kernel, dim3(1), 32, nullptr, Nothing{}); }
"""
NO_BARRIER = """
#include "portable.h"
struct Result { int* numbers; int added; };
KERNEL kernel(Result result) {
  SHARED int shared[64];
  shared[threadIdx.x] = threadIdx.x + result.added;
  result.numbers[threadIdx.x] = shared[threadIdx.x / 2];  // of a thread that has run before, in the usual order
}
int main() {
  int numbers[64], wrong = 0;
  for (int added = 0; added < 2; added++) launch(kernel, dim3(1), 64, nullptr, Result{numbers, added});
  for (int i = 0; i < 64; i++) wrong += numbers[i] != i / 2 + 1;
  return wrong ? 7 : 0;
}
"""
ORDERS = ["1", "2", "77"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def run(program, folder):
    (folder / "program.cpp").write_text(program)
    flags = ["-std=c++17", "-DHF_COMERA_EMULATED", f"-I{sources_folder()}"]
    subprocess.run(["g++", *flags, str(folder / "program.cpp"), "-o", str(folder / "program")], check=True)
    return subprocess.run([str(folder / "program")], capture_output=True, text=True, check=False)


def linear(dtype):
    x, left, right, grad_y = (torch.randn(shape).to(dtype) for shape in ((70, 200), (72, 200), (72, 136), (70, 136)))
    y, code = low_rank_linear(x, left, right, None, "silu")
    return [y, code, *low_rank_linear_backward(grad_y, None, x, code, left, right, rank_activation="silu")]


def wide(dtype):
    make = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
    inputs = [WideInput(make(70, rank), make(rank, 600), make(600)) for rank in (32, 24)]
    form, masks, left = WideForm("gelu", (0, 1), 1.25), [torch.rand(70, 600) < 0.8], make(16, 600)
    return [wide_code(inputs, form, masks, left), *wide_code_backward(make(70, 16), inputs, form, masks, left)]


def halves(dtype):
    cores = [torch.randn(shape).to(dtype) for shape in ((1, 6, 5), (5, 4, 9), (9, 3, 7), (7, 2, 10))]
    backwards = [core.permute(2, 1, 0).contiguous() for core in reversed(cores)]
    gates = [torch.rand(rank) for rank in (5, 9, 7, 10)]
    sides = [Half(cores, True, 140, 16, gates), Half(backwards, False, 144, 16)]
    found = tt_halves_backward(sides, [torch.randn(16, side.features) for side in sides])
    return [*tt_halves(sides, dtype), *(each for grads in found for each in grads)]


def lookup(dtype):
    left, right, ids = torch.randn(9, 6, 8), torch.randn(20, 8, 7), torch.randint(0, 180, (300,))
    gradients = ttm_table_gradients(torch.randn(300, 42), ids, left, right, 180)
    return [ttm_rows(ids, left, right, 180, 42, dtype), *gradients]


def coat(dtype):
    parameters = [new_parameter(shape, dtype) for shape in ((5, 300), (20, 12), (1, 400))]
    coat_adamw_step(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    return [tensor for parameter in parameters for tensor in parameter if isinstance(tensor, torch.Tensor)]


def test_the_compiler_has_nothing_to_say():
    assert "warning" not in build_emulated_library().log.read_text(encoding="utf-8")


def test_a_barrier_that_a_thread_never_reaches_is_an_error(tmp_path):
    done = run(MISSED_BARRIER, tmp_path)
    assert done.returncode != 0
    assert "deadlock" in done.stderr


def test_a_missing_barrier_shows_in_another_order(tmp_path, monkeypatch):
    assert run(NO_BARRIER, tmp_path).returncode == 0
    monkeypatch.setenv("HF_COMERA_EMULATION_ORDER", ORDERS[0])
    assert run(NO_BARRIER, tmp_path).returncode == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compute", [linear, wide, halves, lookup, coat])
def test_no_result_depends_on_the_order_of_threads(compute, dtype, monkeypatch):
    results = []
    for order in ["0", *ORDERS]:
        monkeypatch.setenv("HF_COMERA_EMULATION_ORDER", order)
        torch.manual_seed(0)
        results.append([each.clone() for each in compute(dtype)])
    for other in results[1:]:
        assert all(torch.equal(one, another) for one, another in zip(results[0], other, strict=True))
