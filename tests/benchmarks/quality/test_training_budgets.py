"""benchmarks/quality/training.py: step times are measured in turns, and the widest model within the bytes is found."""

import pytest

from benchmarks.quality import training
from benchmarks.quality.grid import BYTES, SECONDS, STEPS, Run
from benchmarks.quality.tasks import bytes_task
from benchmarks.quality.training import (
    bytes_to_train,
    describe,
    seconds_ratio,
    steps_in_same_seconds,
    width_in_same_bytes,
)
from loop.measure import Timings

RUN = Run(
    task="bytes", data="text", form="tt", rank="4", num_factors=3, update="adamw", lr=1e9,
    other_lr=1e-3, width=16, steps=100, budget=SECONDS, seed=0,
)  # fmt: skip


@pytest.fixture(scope="module")
def task():
    return bytes_task()


def test_ratio_is_that_of_the_dense_step_over_the_tensor_trains(task, monkeypatch):
    def in_turns(candidates, rounds, *, warmup, label):
        for _ in range(warmup + rounds):
            for step in candidates.values():
                assert step().loss < 6  # at the rate of the run it would diverge
        return Timings({name: [1.0 if name == "tensor train" else 1.5] * rounds for name in candidates})

    monkeypatch.setattr(training, "time_interleaved", in_turns)
    assert seconds_ratio(task, RUN, rounds=1) == 1.5


@pytest.mark.parametrize(("ratio", "steps"), [(1.5, 150), (0.25, 25), (0.001, 1)])
def test_steps(ratio, steps):
    assert steps_in_same_seconds(100, ratio) == steps


def test_width_is_the_largest_that_fits(task):
    run = RUN.twin(form="dense", budget=BYTES, width=32)
    limit = bytes_to_train(task, run.twin(form="tt"), 32)
    width = width_in_same_bytes(task, run)
    assert width % 4 == 0
    assert bytes_to_train(task, run, width) <= limit < bytes_to_train(task, run, width + 4)


def test_width_is_the_twins_where_the_tensor_train_is_no_smaller(task):
    assert width_in_same_bytes(task, RUN.twin(form="dense", budget=BYTES, rank="full")) == 16


def test_no_width_fits(task, monkeypatch):
    monkeypatch.setattr(training, "bytes_to_train", lambda task, run, width: 100 if run.form == "tt" else 101)
    with pytest.raises(ValueError, match=r"width 4, the narrowest with 4 heads, needs 101 bytes.*Use a larger"):
        width_in_same_bytes(task, RUN.twin(form="dense", budget=BYTES))


@pytest.mark.parametrize(("budget", "text"), [(STEPS, ""), (SECONDS, "150 steps: "), (BYTES, "width 12 trains")])
def test_what_a_budget_came_to_is_said(budget, text):
    assert describe(RUN.twin(budget=budget), 1.5, 12, 150).startswith(text)
    assert bool(text) == bool(describe(RUN.twin(budget=budget), 1.5, 12, 150))
