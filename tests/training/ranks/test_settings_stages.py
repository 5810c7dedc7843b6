"""training/ranks/settings.py: the order of the stages, where cuts fall, a budget that falls and ends exactly."""

import math

import numpy as np
import pytest

from hf_comera.training.ranks.settings import Stages, resolve_steps

COURSES = [  # total, early, late, cut_every
    pytest.param(100, 20, 50, 2, id="usual"),
    pytest.param(100, 20, 50, 7, id="interval-that-does-not-divide"),
    pytest.param(101, 13, 31, 1, id="a-cut-each-step"),
    pytest.param(100, 30, 0, 10, id="early-only"),
    pytest.param(100, 0, 100, 33, id="late-only-to-the-last-step"),
    pytest.param(100, 20, 50, 1000, id="one-cut-at-the-end"),
    pytest.param(1, 0, 1, 1, id="one-step"),
    pytest.param(10, 0, 0, 1, id="nothing"),
]
every_course = pytest.mark.parametrize(("total", "early", "late", "cut_every"), COURSES)


def stages(total, early, late, cut_every):
    return Stages(total=total, early=early, late=late, cut_every=cut_every)


@every_course
def test_stages_follow_each_other(total, early, late, cut_every):
    course = stages(total, early, late, cut_every)
    names = [course.name(step) for step in range(total)]
    assert names == ["early"] * early + ["late"] * late + ["final"] * (total - early - late)


@every_course
def test_cuts_are_at_intervals_and_at_the_end_of_the_last_stage(total, early, late, cut_every):
    course, end = stages(total, early, late, cut_every), early + late
    cuts = [steps for steps in range(total + 1) if course.cuts_after(steps)]
    assert cuts == list(range(end, 0, -cut_every))[::-1]


@every_course
@pytest.mark.parametrize(("start", "end"), [(1000, 10), (12345, 12344), (7, 0), (5, 5)])
def test_budgets_fall_from_the_start_to_exactly_the_end(total, early, late, cut_every, start, end):
    course = stages(total, early, late, cut_every)
    budgets = [course.budget(steps, start, end) for steps in range(total + 1)]
    assert all(isinstance(budget, int) for budget in budgets)
    assert budgets == sorted(budgets, reverse=True)
    assert set(budgets[: early + 1]) == {start}
    assert set(budgets[early + late :]) == ({end} if late else {start})


def test_budgets_follow_the_cube():
    course = stages(100, 20, 40, 5)
    assert [course.budget(steps, 1100, 100) for steps in (20, 30, 40, 50, 60)] == [1100, 521, 225, 115, 100]


@pytest.mark.parametrize(
    ("value", "total", "steps"),
    [(0, 10, 0), (7, 10, 7), (10, 10, 10), (0.0, 10, 0), (0.25, 100, 25), (1.0, 33, 33), (0.3, 5, 2), (1, 10, 1)],
)
def test_steps_are_counted_or_a_part_of_the_training(value, total, steps):
    resolved = resolve_steps("early", value, total)
    assert resolved == steps
    assert isinstance(resolved, int)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, r"early=-1 is needed as a number of steps"),
        (-0.1, r"early=-0\.1 is needed"),
        (True, r"early=True is needed"),
        ("0.3", r"early='0\.3' is needed.*a float such as 0\.3"),
        (None, "early=None is needed"),
        (math.nan, "early=nan is needed"),
        (math.inf, "early=inf is needed"),
        (np.array(3), "is needed as a number of steps"),
        (30.0, r"early=30\.0 is a float and so a part.*For 30 steps, give the integer early=30\."),
        (1.5, r"early=1\.5 is a float"),
        (51, "early=51 is longer than the training, which has 50 steps. Use at most 50"),
    ],
)
def test_bad_values_are_named(value, message):
    with pytest.raises(ValueError, match=message):
        resolve_steps("early", value, 50)
