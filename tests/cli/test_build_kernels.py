"""hf_comera/cli/build_kernels.py: compiles kernels for machines elsewhere, and shows what they take."""

import pytest

from hf_comera.ops.cuda import library
from hf_comera.ops.cuda.build import KernelBuild

LOG = """
ptxas info    : Compiling entry function '_ZN1_13linear_kernelILi0ELi32ELb1EEEvNS_6LinearE' for 'sm_80'
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 40960 bytes smem
"""


@pytest.fixture(autouse=True)
def _bare_machine(bare_machine):
    pass


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Architectures that were to be built for."""
    found = []
    (tmp_path / "log").write_text(LOG)

    def build_library(architecture):
        found.append(architecture)
        return KernelBuild(tmp_path / "library", tmp_path / "log")

    monkeypatch.setattr(library, "build_library", build_library)
    return found


def test_shows_resources(asked, call):
    answer = call("build-kernels", "-a", "sm_80", "--architecture", "sm_90a")
    assert answer.code == 0
    assert asked == ["sm_80", "sm_90a"]
    rows = [line.split() for line in answer.out.splitlines() if "linear<bf16, 32, aligned>" in line]
    assert len(rows) == 2
    for word in ("sm_80", "128", "20", "40960"):  # registers, bytes stored and loaded for want of them, shared memory
        assert all(word in row for row in rows)


def test_json_has_the_same(asked, call):
    (kernel,) = call("build-kernels", "-a", "sm_80", "--json").json()["kernels"]
    assert (kernel["architecture"], kernel["num_registers"], kernel["spilled_bytes"]) == ("sm_80", 128, 20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "torch finds no CUDA device"),
        (["-a", "sm_90a"], "nvcc, the CUDA compiler, was not found"),
        (["-a", "sm_70"], "'sm_70' is not supported"),
    ],
)
def test_says_why_it_cannot(arguments, words, call):
    answer = call("build-kernels", *arguments)
    assert answer.code == 1
    assert words in answer.said
