"""The settings of rank adaptation: what they become, and what is refused."""

import json

import numpy as np
import pytest
from torch import nn

from hf_comera import (
    ComeraConfig,
    RankAdaptation,
    RankAdapter,
    TTMuon,
    add_rank_gates,
    get_comera_model,
    size_report,
)
from hf_comera.modules import TTLinear
from hf_comera.training.ranks.budget import core_budget
from tests.architectures import ARCHITECTURES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_ratio": 0.0}, r"target_ratio=0.0 .* must be above 0 and at most 1, for example target_ratio=0.02"),
        ({"target_ratio": 1.5}, "target_ratio=1.5"),
        ({"target_ratio": float("nan")}, "target_ratio=nan"),
        ({"target_ratio": "0.1"}, "target_ratio='0.1' is the wanted part of the dense parameters and must be"),
        ({"target_ratio": True}, "target_ratio=True"),
        ({"target_parameters": 0}, "target_parameters=0 is not an integer of at least 1. Use for example"),
        ({"target_parameters": 1e6}, "target_parameters=1000000.0 is not an integer"),
        ({"target_ratio": 0.1, "target_parameters": 10}, "are both given. Give the one that you know"),
        ({"early": -1}, "early=-1 is needed as a number of steps"),
        ({"early": 1.5}, "early=1.5 is a float and so a part of the training"),
        ({"late": True}, "late=True is needed"),
        ({"cut_every": "often"}, "cut_every='often' is needed"),
        ({"gamma": -0.1}, "gamma=-0.1 must be a finite number of at least 0, for example gamma=0.1"),
        ({"gamma": float("inf")}, "gamma=inf must be a finite number"),
        ({"gamma": 10**400}, "gamma=10*00 must be a finite number"),
        ({"gamma": "x"}, "gamma='x' must be a finite number"),
        ({"gamma": None}, "gamma=None must be a finite number"),
        ({"beta": float("nan")}, "beta=nan must be a finite number"),
        ({"beta": float("inf")}, "beta=inf must be a finite number"),
        ({"pressure": float("inf")}, "pressure=inf must be a finite number"),
        ({"rho": float("inf")}, "rho=inf must be a finite number"),
        ({"wanted_loss": 0.0}, "wanted_loss=0.0 must be a finite number other than zero"),
        ({"wanted_loss": -float("inf")}, "wanted_loss=-inf must be a finite number .* for example 0.8, or None"),
        ({"wanted_loss": "0.8"}, "wanted_loss='0.8' must be a finite number"),
        ({"threshold": 1.0}, "threshold=1.0 must be a number of at least 0 and below 1"),
        ({"threshold": "0.01"}, "threshold='0.01' must be a number of at least 0 and below 1, for example 0.01"),
        ({"min_rank": -1}, "min_rank=-1 is not an integer of at least 0"),
    ],
)
def test_bad_settings_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        RankAdaptation(**settings)


@pytest.mark.parametrize(
    ("settings", "total", "message"),
    [
        (
            {"early": 600, "late": 600},
            1000,
            "are 600 and 600 steps, together longer than the training",
        ),
        ({"early": 1001}, 1000, "early=1001 is longer than the training, which has 1000 steps"),
        ({"target_ratio": 0.5, "late": 0}, 1000, "late=0 leaves no step to reach the wanted size in"),
        ({}, 0, "total_steps=0 is not an integer of at least 1"),
    ],
)
def test_stages_that_do_not_fit_the_training_raise(settings, total, message):
    with pytest.raises(ValueError, match=message):
        RankAdaptation(**settings).stages(total)


def test_numbers_of_numpy_are_numbers():
    settings = RankAdaptation(
        target_parameters=np.int64(500), early=np.int32(3), late=np.float32(0.5), gamma=np.float64(0.1)
    )
    assert settings == RankAdaptation(target_parameters=500, early=3, late=0.5, gamma=0.1)
    assert json.loads(json.dumps(vars(settings))) == vars(settings)
    assert settings.stages(np.int64(10)) == settings.stages(10)


def test_stages_in_steps_and_in_parts():
    stages = RankAdaptation(target_ratio=0.5, early=0.2, late=500, cut_every=0.05).stages(1000)
    assert (stages.early, stages.late, stages.cut_every) == (200, 500, 50)


def test_the_shortest_training_has_a_step_to_cut_in():
    stages = RankAdaptation(target_ratio=0.5).stages(1)
    assert (stages.early, stages.late) == (0, 1)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 101])
@pytest.mark.parametrize("early", [0.05, 0.3, 0.5, 0.55, 0.9])
@pytest.mark.parametrize("target", [None, 0.5])
def test_parts_that_fill_the_training_fill_it(early, total, target):
    stages = RankAdaptation(target_ratio=target, early=early, late=1 - early).stages(total)
    assert total - 1 <= stages.early + stages.late <= total
    assert target is None or stages.late > 0


def test_without_a_wanted_size_there_is_only_the_early_stage():
    stages = RankAdaptation(early=0.2, late=0.5).stages(1000)
    assert (stages.early, stages.late) == (700, 0)


@pytest.mark.parametrize("gated", [False, True])
def test_budgets_are_what_the_rest_of_the_model_leaves(gated):
    architecture = ARCHITECTURES["bert-mlm"]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    report = size_report(model)
    cores, others = report.compressed_parameters, report.parameters - report.compressed_parameters
    if gated:
        for module in model.modules():
            if hasattr(module, "add_rank_gates"):
                module.add_rank_gates()
    assert core_budget(RankAdaptation(target_parameters=others + 100), model, cores) == 100
    ratio = (others + 200) / report.dense_parameters
    assert core_budget(RankAdaptation(target_ratio=ratio + 1e-9), model, cores) == 200
    assert core_budget(RankAdaptation(), model, cores) is None


def test_no_ratio_above_one_is_advised():
    layer = nn.Sequential(TTLinear(4, 4, ranks=4))
    add_rank_gates(layer)
    with pytest.raises(ValueError, match=r"target_parameters=\d+, or compress more layers"):
        RankAdapter(layer, TTMuon(layer), RankAdaptation(target_ratio=0.001, min_rank=4), total_steps=10)
