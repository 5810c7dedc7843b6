"""Two processes with gloo write one whole checkpoint together, and both resume from the newest that is whole."""

import json

from hf_comera.training.whole_checkpoint import MANIFEST, damage
from tests import processes


def test_states_of_both_processes_are_part_of_the_checkpoint(tmp_path):
    result = processes.run("-m", "tests.integration.checkpoint_worker", tmp_path / "out", workers=2)
    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["resumed"] == first["whole"]
    assert {f"checkpoint-2/{name}" for name in ("rng_state_0.pth", "rng_state_1.pth", MANIFEST)} <= set(first["names"])
    assert not any(name.startswith("_") for name in first["names"])
    assert result.stderr.count("rng_state_1.pth is missing. Training goes on from") == 1  # one process tells
    assert damage(tmp_path / "out" / "checkpoint-4") is None  # written anew
