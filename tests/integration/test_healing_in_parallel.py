"""Two processes heal a model to the losses and weights of one process with the whole batch, of unequal lengths."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(kind, folder, *launcher):
    folder.mkdir()
    program = [sys.executable, *launcher, "-m", "tests.integration.heal_worker", kind, str(folder)]
    result = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert result.returncode == 0, result.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("kind", ["gpt2", "bert-classifier"])
def test_losses_and_weights_equal_those_of_one_process(kind, tmp_path):
    (one,) = run(kind, tmp_path / "one")
    both = run(kind, tmp_path / "two", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert len(both) == 2
    for two in both:
        for name in ("losses", "parts", "eval", "sum"):
            assert two[name] == pytest.approx(one[name], rel=1e-6), name
