"""tests/kernels/conftest.py: without g++ tests of kernels are skipped at home, and fail where all must run."""

from pathlib import Path

import pytest
import torch

CI = Path(__file__).parents[2] / ".ci" / "run"


@pytest.mark.parametrize("device", [torch.device("cpu")], ids=str)
@pytest.mark.parametrize(("required", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_without_a_compiler(required, outcome, device, request, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_COMERA_REQUIRE_EMULATION", required)
    with pytest.raises(outcome, match=r"g\+\+ is not installed"):
        request.getfixturevalue("kernels")


def test_all_must_run_in_ci():
    assert "export HF_COMERA_REQUIRE_EMULATION=1" in CI.read_text(encoding="utf-8")
