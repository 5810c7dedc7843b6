"""scripts/bench_paths.py: both choices are held against the best: the plan for this CPU, and what layers take."""

import torch

from bench_paths import LAYERS, compare, figures, show
from hf_comera.modules import TTLinear
from hf_comera.tt.machine import CPU_THREAD
from hf_comera.tt.path import candidate_paths, plan_path
from interleaved_timing import Timings


def test_every_choice_is_held_against_the_best(capsys):
    settings = {"training": False, "halves_cached": True, "machine": CPU_THREAD, "dtype": torch.float32}
    paths = candidate_paths(plan_path((4, 2), (2, 4), (2, 3, 2), 5, **settings).problem)
    planned = paths[0].label
    others = [path.label for path in paths if path.label != planned]
    seconds = {label: [0.4] for label in others} | {planned: [0.105], others[0]: [0.2], others[1]: [0.1]}
    row = figures(paths, others[0], Timings(seconds), repeats=1)
    assert (row["planned"], row["taken"], row["best"]) == (planned, others[0], others[1])
    assert (row["planned_over_best"], row["taken_over_best"]) == (1.05, 2.0)
    show([row | {"layer": "8x8", "rank": 3, "rows": 5, "pass": "inference"}])
    printed = capsys.readouterr().out
    assert "Planned path within 10% of the best in 1 of 1 cases." in printed
    assert "Path that a layer takes within 10% of the best in 0 of 1 cases." in printed


def test_taken_is_what_a_layer_takes():
    shape = LAYERS[0]
    layer = TTLinear(768, 768, in_factors=shape.in_factors, out_factors=shape.out_factors, ranks=shape.ranks)
    for training in (False, True):
        row = compare(shape, 1, training, "fp32", 1, CPU_THREAD)
        assert row["taken"] == layer.path(1, torch.float32, training=training).label
