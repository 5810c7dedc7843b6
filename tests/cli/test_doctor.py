"""hf_comera/cli/doctor.py: says what is there and what to install."""

import pytest
import torch

from hf_comera.cli import doctor


@pytest.fixture(autouse=True)
def _bare_machine(bare_machine):
    pass


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Pretended GPU")


def test_on_a_bare_machine(tmp_path, call):
    answer = call("doctor")
    assert answer.code == 0
    assert torch.__version__ in answer.out
    assert "not used: torch finds no CUDA device" in answer.out
    assert str(tmp_path / "cache") in answer.out
    assert answer.out.count("not found") == 2  # nvcc and g++
    assert "plain torch" in answer.out


def test_json_has_the_same(tmp_path, call):
    found = call("doctor", "--json").json()
    assert (found["nvcc"], found["CUDA devices"], found["cache"]) == ("not found", "none", str(tmp_path / "cache"))
    assert any("plain torch" in line for line in found["advice"])


def test_asks_for_nvcc_where_a_gpu_is(monkeypatch, call):
    pretend_gpu(monkeypatch, (9, 0))
    answer = call("doctor")
    assert "Pretended GPU (9.0)" in answer.out
    assert "not built: nvcc" in answer.out
    assert "- For the CUDA kernels: Install the CUDA toolkit" in answer.out


def test_says_whether_the_kernels_are_built(monkeypatch, bare_machine, call):
    pretend_gpu(monkeypatch, (8, 0))
    bare_machine.mkdir()
    program = bare_machine / "nvcc"
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    program.chmod(0o755)
    answer = call("doctor")
    assert "release 13.0" in answer.out
    assert "not built yet for sm_80" in answer.out
    assert "nvcc needs a C++ compiler" in answer.out
    monkeypatch.setattr(doctor, "is_built", lambda architecture: True)
    monkeypatch.setattr(doctor, "kernels_refusal", lambda device: None)
    assert "built for sm_80 " in call("doctor").out
    monkeypatch.setattr(doctor, "kernels_refusal", lambda device: f"a trial launch on {device} failed")
    assert "built for sm_80, but not used: a trial launch on cuda:0 failed" in call("doctor").out


def test_names_a_gpu_that_is_too_old(monkeypatch, call):
    pretend_gpu(monkeypatch, (7, 0))
    assert "capability 7.0, the kernels need 8.0" in call("doctor").out
