"""hf_comera/compress/allotment.py: the wanted size is met within a rank, and ranks go where the output needs them."""

import pytest
import torch

from hf_comera import ComeraConfig, calibrate, plan
from hf_comera.compress.allotment import allot
from tests.architectures import ARCHITECTURES

KINDS = ["bert-classifier", "gpt2", "llama-tied", "t5"]


@pytest.fixture(scope="module", params=KINDS)
def calibrated(request):
    torch.manual_seed(0)
    architecture = ARCHITECTURES[request.param]
    model = architecture.new_model()
    return model, calibrate(model, [architecture.inputs() for _ in range(8)])


@pytest.mark.parametrize("ratio", [0.9, 0.6, 0.45])
def test_the_wanted_size_is_met_within_a_rank(calibrated, ratio):
    model, calibration = calibrated
    config = ComeraConfig(target_ratio=ratio)
    dense = plan(model, ComeraConfig())
    found = allot(dense, config, calibration)
    wanted = int(ratio * dense.dense_parameters)
    assert wanted - max(x.in_size + x.out_size for x in found.layers) < found.parameters <= wanted
    same = allot(dense, ComeraConfig(target_parameters=wanted), calibration)
    assert same.layers == found.layers
    for layer in found.layers:
        assert layer.parameters < layer.dense_parameters
        assert layer.kind in ("tt_linear", "factorized_embedding")


def test_ranks_follow_the_sensitivities(calibrated):
    model, calibration = calibrated
    dense = plan(model, ComeraConfig())
    name = next(layer.name for layer in dense.layers if layer.kind == "tt_linear")
    before = allot(dense, ComeraConfig(target_ratio=0.5), calibration).by_name[name]
    kept = calibration.sensitivities.get(name)
    calibration.sensitivities[name] = 1e9
    most = allot(dense, ComeraConfig(target_ratio=0.5), calibration).by_name[name]
    calibration.sensitivities[name] = 0.0
    least = allot(dense, ComeraConfig(target_ratio=0.5), calibration).by_name[name]
    calibration.sensitivities[name] = kept
    assert least.ranks[0] == 1
    assert least.ranks[0] <= before.ranks[0] <= most.ranks[0]


def test_a_size_out_of_reach_names_the_smallest(calibrated):
    model, calibration = calibrated
    dense = plan(model, ComeraConfig())
    with pytest.raises(ValueError, match="target_parameters=7 asks for 7 parameters") as caught:
        allot(dense, ComeraConfig(target_parameters=7), calibration)
    smallest = int(str(caught.value).partition("at least target_parameters=")[2].partition(" ")[0])
    assert allot(dense, ComeraConfig(target_parameters=smallest), calibration).parameters == smallest
    with pytest.raises(ValueError, match=f"at least target_parameters={smallest} "):
        allot(dense, ComeraConfig(target_parameters=smallest - 1), calibration)


def test_without_sensitivities_ranks_cannot_be_allotted():
    architecture = ARCHITECTURES["bert-classifier"]
    model = architecture.new_model()
    calibration = calibrate(model, [architecture.inputs()], sensitivities=False)
    with pytest.raises(ValueError, match="calibration has no sensitivities"):
        allot(plan(model, ComeraConfig()), ComeraConfig(target_ratio=0.5), calibration)
