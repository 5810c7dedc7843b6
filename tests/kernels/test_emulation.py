"""kernels/emulation.h: no warnings; missed barriers are told; no result depends on which threads run first."""

import shutil
import subprocess

import pytest
import torch

from hf_comera.ops.cuda.build import build_emulated_library, sources_folder
from tests.kernels.every_call import CALLS

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
@pytest.mark.parametrize("prepare", CALLS)
def test_no_result_depends_on_the_order_of_threads(prepare, dtype, monkeypatch):
    results = []
    for order in ["0", *ORDERS]:
        monkeypatch.setenv("HF_COMERA_EMULATION_ORDER", order)
        torch.manual_seed(0)
        results.append([each.clone() for each in prepare(dtype)()])
    for other in results[1:]:
        assert all(torch.equal(one, another) for one, another in zip(results[0], other, strict=True))
