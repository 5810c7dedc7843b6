"""kernels/emulation.h: the emulated build has no warnings, and a barrier that not all threads reach is told."""

import shutil
import subprocess

import pytest

from hf_comera.ops.kernel_build import build_emulated_library, sources_folder

PROGRAM = """
#include "portable.h"
struct Nothing {};
KERNEL kernel(Nothing) {
  if (threadIdx.x == 3) return;
  __syncthreads();
}
int main() { return launch(kernel, dim3(1), 32, nullptr, Nothing{}); }
"""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def test_the_compiler_has_nothing_to_say():
    assert "warning" not in build_emulated_library().log.read_text(encoding="utf-8")


def test_a_barrier_that_a_thread_never_reaches_is_an_error(tmp_path):
    (tmp_path / "program.cpp").write_text(PROGRAM)
    flags = ["-std=c++17", "-DHF_COMERA_EMULATED", f"-I{sources_folder()}"]
    subprocess.run(["g++", *flags, str(tmp_path / "program.cpp"), "-o", str(tmp_path / "program")], check=True)
    done = subprocess.run([str(tmp_path / "program")], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "deadlock" in done.stderr
