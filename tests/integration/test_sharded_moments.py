"""CoatAdamW under FSDP2 with gloo: one state, whatever the number of processes that trained, saved or loaded it."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from hf_comera import CoatAdamW
from tests import processes
from tests.integration.fsdp_worker import MODELS, STEPS, load, train


def run(kind, target, *source):
    target.mkdir()
    result = processes.run("-m", "tests.integration.fsdp_worker", kind, target, *source, workers=2)
    assert result.returncode == 0, result.stderr
    return torch.load(target / "whole.pt", weights_only=True)


def same(one, other):
    assert one.keys() == other.keys()
    return all(same(one[k], other[k]) if isinstance(one[k], dict) else torch.equal(one[k], other[k]) for k in one)


@pytest.fixture(scope="module", params=MODELS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def unsharded(kind):
    model = MODELS[kind]()
    optimizer = CoatAdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    state = {name: {key: value.clone() for key, value in of_name.items()} for name, of_name in state.items()}
    train(model, optimizer, STEPS)
    return state, model.state_dict()


@pytest.fixture(scope="module")
def of_two(kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two") / "run"
    return folder, run(kind, folder)


def test_two_processes_have_the_state_of_one(of_two, unsharded):
    assert same(of_two[1]["optimizer"]["state"], unsharded[0])
    assert same(of_two[1]["after"], unsharded[1])


def test_what_two_saved_two_load(kind, of_two, tmp_path):
    folder, expected = of_two
    found = run(kind, tmp_path / "again", folder)
    assert same(found["optimizer"]["state"], expected["optimizer"]["state"])
    assert same(found["after"], expected["after"])


def test_what_two_saved_loads_without_sharding(kind, of_two):
    folder, expected = of_two
    model = MODELS[kind]()
    optimizer = CoatAdamW(model.parameters(), lr=1e-2)
    load(model, optimizer, folder)
    assert same(get_optimizer_state_dict(model, optimizer)["state"], expected["optimizer"]["state"])
    train(model, optimizer, STEPS)
    assert same(model.state_dict(), expected["after"])
