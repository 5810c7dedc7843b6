"""benchmarks/quality/tasks.py: the last tenth of each module is held out, and batches follow from seed and step."""

import numpy as np
import pytest
import torch

from benchmarks.quality import tasks
from benchmarks.quality.tasks import BYTES_LENGTH, ByteBatches, bytes_task, split_text, windows


def test_the_last_tenth_is_held_out():
    training, held_out = split_text(bytes(range(200)))
    assert (training[-1], held_out[0], held_out[-1]) == (179, 180, 199)


def test_windows_do_not_overlap():
    assert windows(np.arange(3 * BYTES_LENGTH + 5)).ravel().tolist() == list(range(3 * BYTES_LENGTH))


def test_batches_follow_from_seed_and_step():
    text = np.arange(5000) % 251
    one, again, other = ByteBatches(text, 0), ByteBatches(text, 0), ByteBatches(text, 1)
    assert torch.equal(one[3]["input_ids"], again[3]["input_ids"])
    assert not torch.equal(one[3]["input_ids"], one[4]["input_ids"])
    assert not torch.equal(one[3]["input_ids"], other[3]["input_ids"])
    assert ((one[0]["input_ids"].diff() - 1) % 251 == 0).all()


def test_held_out_sequences_are_the_same_for_every_seed_and_not_trained_on():
    task = bytes_task()
    held_out = torch.cat([batch["input_ids"] for batch in task.held_out])
    assert held_out.shape == (192, BYTES_LENGTH)
    training = task.batches(0).text.tobytes()
    assert sum(bytes(row.tolist()) in training for row in held_out) < 20  # code repeats itself now and then


def test_a_python_without_sources(monkeypatch):
    def no_source(module):
        raise OSError("could not get source code")

    monkeypatch.setattr(tasks.inspect, "getsource", no_source)
    with pytest.raises(ValueError, match="source of module json was not found"):
        bytes_task()
