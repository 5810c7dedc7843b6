"""hf_comera/cli.py: says what is there and what to install, and compiles kernels for machines elsewhere."""

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from hf_comera import cli
from hf_comera.cli import app
from hf_comera.ops.cuda import build, library
from hf_comera.ops.cuda.build import KernelBuild

LOG = """
ptxas info    : Compiling entry function '_ZN1_13linear_kernelILi0ELi32ELb1EEEvNS_6LinearE' for 'sm_80'
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 40960 bytes smem
"""


@pytest.fixture(autouse=True)
def _bare_machine(tmp_path, monkeypatch):
    """No GPU, no compiler, an empty cache."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_COMERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(build, "DEFAULT_CUDA_HOME", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Pretended GPU")


def pretend_compiler(tmp_path, name, version):
    program = tmp_path / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)


def test_help_teaches():
    code, output = run("--help")
    assert code == 0
    assert "doctor" in output
    assert "build-kernels" in output
    code, output = run("build-kernels", "--help")
    assert "sm_90a" in output
    assert "Example" in output


def test_doctor_on_a_bare_machine(tmp_path):
    code, output = run("doctor")
    assert code == 0
    assert torch.__version__ in output
    assert "not used: torch finds no CUDA device" in output
    assert str(tmp_path / "cache") in output
    assert output.count("not found") == 2  # nvcc and g++
    assert "plain torch" in output


def test_doctor_asks_for_nvcc_where_a_gpu_is(monkeypatch):
    pretend_gpu(monkeypatch, (9, 0))
    _, output = run("doctor")
    assert "Pretended GPU (9.0)" in output
    assert "not built: nvcc" in output
    assert "- For the CUDA kernels: Install the CUDA toolkit" in output


def test_doctor_says_whether_the_kernels_are_built(monkeypatch, tmp_path):
    pretend_gpu(monkeypatch, (8, 0))
    pretend_compiler(tmp_path, "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    _, output = run("doctor")
    assert "release 13.0" in output
    assert "not built yet for sm_80" in output
    assert "nvcc needs a C++ compiler" in output
    monkeypatch.setattr(cli, "is_built", lambda architecture: True)
    monkeypatch.setattr(cli, "kernels_refusal", lambda device: None)
    assert "built for sm_80 " in run("doctor")[1]
    monkeypatch.setattr(cli, "kernels_refusal", lambda device: f"a trial launch on {device} failed")
    assert "built for sm_80, but not used: a trial launch on cuda:0 failed" in run("doctor")[1]


def test_doctor_names_a_gpu_that_is_too_old(monkeypatch):
    pretend_gpu(monkeypatch, (7, 0))
    assert "capability 7.0, the kernels need 8.0" in run("doctor")[1]


def test_build_kernels_shows_resources(monkeypatch, tmp_path):
    asked = []
    (tmp_path / "log").write_text(LOG)

    def build_library(architecture):
        asked.append(architecture)
        return KernelBuild(tmp_path / "library", tmp_path / "log")

    monkeypatch.setattr(library, "build_library", build_library)
    code, output = run("build-kernels", "-a", "sm_80", "--architecture", "sm_90a")
    assert code == 0
    assert asked == ["sm_80", "sm_90a"]
    rows = [line.split() for line in output.splitlines() if "linear<bf16, 32, aligned>" in line]
    assert len(rows) == 2
    for word in ("sm_80", "128", "20", "40960"):  # registers, bytes stored and loaded for want of them, shared memory
        assert all(word in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "torch finds no CUDA device"),
        (["-a", "sm_90a"], "nvcc, the CUDA compiler, was not found"),
        (["-a", "sm_70"], "'sm_70' is not supported"),
    ],
)
def test_build_kernels_says_why_it_cannot(arguments, words):
    code, output = run("build-kernels", *arguments)
    assert code == 1
    assert words in output


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "hf_comera", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python -m hf_comera" in done.stdout
