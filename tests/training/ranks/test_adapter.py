"""Rank adaptation in a plain loop: sizes met exactly, exact resumption, no waiting for the device."""

import copy
import json
import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_comera import (
    ComeraConfig,
    RankAdaptation,
    RankAdapter,
    TTMuon,
    add_rank_gates,
    comera_param_groups,
    get_comera_model,
    size_report,
)
from hf_comera.modules import TensorTrainModule
from tests.architectures import ARCHITECTURES

OPTIMIZERS = {
    "tt_muon": lambda model: TTMuon(model, 1e-3),
    "adamw": lambda model: torch.optim.AdamW(comera_param_groups(model, 1e-3)),
    "fused adamw": lambda model: torch.optim.AdamW(comera_param_groups(model, 1e-3), fused=True),
}
STEPS = 12


def compressed(name="bert-mlm", rank=6, **settings):
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    model = get_comera_model(
        architecture.auto_class, ComeraConfig(rank=rank), config=architecture.new_config(), **settings
    )
    return model.eval(), architecture.training_inputs()


def target(model, part):
    report = size_report(model)
    return int(report.parameters - (1 - part) * report.compressed_parameters)


def adapted(model, settings, optimizer="tt_muon"):
    add_rank_gates(model)
    optimizer = OPTIMIZERS[optimizer](model)
    return optimizer, RankAdapter(model, optimizer, settings, total_steps=STEPS)


def train(model, optimizer, adapter, inputs, steps, parts=1):
    for _ in range(steps):
        loss = torch.zeros(())
        for _ in range(parts):
            part = model(**inputs).loss / parts
            part.backward()
            loss = loss + part.detach()
        adapter.before_step(loss)
        optimizer.step()
        adapter.after_step()
        optimizer.zero_grad()


def largest_slice(model):
    """Parameters of the largest rank of any bond."""
    trains = [module for module in model.modules() if isinstance(module, TensorTrainModule)]
    pairs = [pair for train in trains for pair in zip(train.cores(), train.cores()[1:], strict=False)]
    return max(a.numel() // a.shape[-1] + b.numel() // b.shape[0] for a, b in pairs if a.numel() and b.numel())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["bert-mlm", "gpt2", "t5"])
@pytest.mark.parametrize("part", [0.9, 0.35])
def test_the_wanted_size_is_met_within_one_rank(name, part, optimizer):
    model, inputs = compressed(name)
    wanted = target(model, part)
    settings = RankAdaptation(target_parameters=wanted, early=2, late=8, cut_every=2)
    optimizer, adapter = adapted(model, settings, optimizer)
    train(model, optimizer, adapter, inputs, STEPS)
    adapter.finish()
    size = size_report(model).parameters
    assert wanted - largest_slice(model) < size <= wanted
    assert not any("rank_gate" in key for key in model.state_dict())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.numel()}
    assert all(p.requires_grad for p in model.parameters() if p.numel())


LOSS_FACTORS = {"nan": lambda _: torch.nan, "ascent": lambda _: -1, "zero": lambda _: 0, "exploding": lambda k: 10**k}


@pytest.mark.parametrize("factor", LOSS_FACTORS.values(), ids=LOSS_FACTORS)
def test_the_wanted_size_is_met_whatever_the_loss_did(factor):
    model, inputs = compressed()
    wanted = target(model, 0.4)
    optimizer, adapter = adapted(model, RankAdaptation(target_parameters=wanted, early=2, late=8, cut_every=2))
    for step in range(STEPS):
        loss = model(**inputs).loss * factor(step)
        loss.backward()
        adapter.before_step(loss.abs())
        if loss.isfinite():  # gradient scalers leave out the others
            optimizer.step()
        adapter.after_step()
        optimizer.zero_grad()
    assert adapter.stage == "final"
    gates = sum(gate.numel() for gate in adapter.table.gates)
    assert wanted - largest_slice(model) < size_report(model).parameters - gates <= wanted


def test_a_ratio_is_of_the_dense_model():
    model, inputs = compressed()
    dense = size_report(model).dense_parameters
    ratio = 0.9 * size_report(model).parameters / dense
    optimizer, adapter = adapted(model, RankAdaptation(target_ratio=ratio, early=2, late=8))
    train(model, optimizer, adapter, inputs, STEPS)
    adapter.finish()
    assert ratio * dense - largest_slice(model) < size_report(model).parameters <= ratio * dense


def test_the_size_falls_in_the_late_stage_and_is_recorded():
    model, inputs = compressed()
    optimizer, adapter = adapted(model, RankAdaptation(target_parameters=target(model, 0.4), early=3, late=6))
    logs = []
    for _ in range(STEPS):
        logs.append(adapter.logs() | {"size": size_report(model).parameters})
        train(model, optimizer, adapter, inputs, 1)
    assert [log["rank_stage"] for log in logs] == [0.0] * 3 + [1.0] * 6 + [2.0] * 3
    assert logs[3]["parameters"] == logs[0]["parameters"] > logs[6]["parameters"] > logs[9]["parameters"]
    assert all(0 < log["relaxed_size"] < 1 and log["live_ranks"] > 0 for log in logs)
    assert logs[4]["smoothed_loss"] > 0
    report = model.rank_report()
    assert report.sizes[0] == logs[0]["parameters"]
    assert list(report.sizes) == sorted(report.sizes, reverse=True)
    assert sum(map(sum, report.after.values())) == logs[-1]["live_ranks"]


def test_cuts_and_the_end_change_outputs_by_rounding_only(monkeypatch):
    model, inputs = compressed()
    model.double()
    optimizer, adapter = adapted(model, RankAdaptation(early=4, late=4, gamma=0.0, threshold=0.0, cut_every=4))
    train(model, optimizer, adapter, inputs, 3)
    optimizer.step = lambda: None
    before = model(**inputs).logits
    train(model, optimizer, adapter, inputs, 1)  # nothing is dead: the basis changes, and that is all
    torch.testing.assert_close(model(**inputs).logits, before)
    adapter.finish()
    torch.testing.assert_close(model(**inputs).logits, before)


def test_an_impossible_size_raises_before_training_and_names_the_smallest():
    model, inputs = compressed()
    with pytest.raises(ValueError, match=r"asks for 1,000 parameters, but .* smallest possible size is") as error:
        adapted(model, RankAdaptation(target_parameters=1000, early=2, late=8))
    smallest = int(str(error.value).split("target_parameters=")[-1].split(" ")[0])
    optimizer, adapter = adapted(model, RankAdaptation(target_parameters=smallest, early=2, late=8))
    train(model, optimizer, adapter, inputs, STEPS)
    assert size_report(model).parameters - sum(g.numel() for g in adapter.table.gates) == smallest
    with pytest.raises(ValueError, match="smallest possible"):
        adapted(compressed()[0], RankAdaptation(target_parameters=smallest - 1, early=2, late=8))


def test_whole_layers_go_where_that_is_allowed():
    model, inputs = compressed()
    small = RankAdaptation(target_parameters=target(model, 0.02), min_rank=0, early=2, late=8)
    optimizer, adapter = adapted(model, small)
    train(model, optimizer, adapter, inputs, STEPS)
    adapter.finish()
    trains = {name: m for name, m in model.named_modules() if isinstance(m, TensorTrainModule)}
    removed = [name for name, module in trains.items() if module.is_removed]
    assert removed
    assert not any("embedding" in name for name in removed)  # a model must see its input
    size = size_report(model).parameters
    ones = min(sum(core.shape[1:-1].numel() for core in trains[name].cores()) for name in removed)
    assert small.target_parameters - max(largest_slice(model), ones) < size <= small.target_parameters
    assert model(**inputs).loss.isfinite()


def test_a_model_that_is_small_enough_stays_and_says_so(caplog):
    model, inputs = compressed()
    optimizer, adapter = adapted(model, RankAdaptation(target_ratio=1.0, early=2, late=8, threshold=0.0))
    with caplog.at_level(logging.WARNING):
        train(model, optimizer, adapter, inputs, 2)
    assert "No rank will be pruned" in caplog.text


def test_a_training_that_ends_early_still_meets_the_size(caplog):
    model, inputs = compressed()
    wanted = target(model, 0.3)
    optimizer, adapter = adapted(model, RankAdaptation(target_parameters=wanted, early=4, late=8))
    train(model, optimizer, adapter, inputs, 3)
    with caplog.at_level(logging.WARNING):
        adapter.finish()
    assert "was not reached in 3 of 12 steps" in caplog.text
    assert size_report(model).parameters <= wanted


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_steps_and_three_after_resuming_equal_six(optimizer):
    def start(model=None):
        model, inputs = (model, compressed()[1]) if model is not None else compressed()
        settings = RankAdaptation(target_parameters=wanted, min_rank=0, early=1, late=8, cut_every=1)
        return model, inputs, *adapted(model, settings, optimizer)

    wanted = target(compressed()[0], 0.1)
    model, inputs, steps, adapter = start()
    train(model, steps, adapter, inputs, 5)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(steps.state_dict()), json.dumps(adapter.state_dict())
    assert any(module.is_removed for module in model.modules() if isinstance(module, TensorTrainModule))
    train(model, steps, adapter, inputs, 3)

    resumed, inputs, steps, adapter = start(compressed()[0])
    resumed.load_state_dict(saved[0])
    steps.load_state_dict(saved[1])
    adapter.load_state_dict(json.loads(saved[2]))
    train(resumed, steps, adapter, inputs, 3)
    assert model.state_dict().keys() == resumed.state_dict().keys()
    assert all(torch.equal(value, resumed.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_state_of_another_model_is_refused():
    model, _ = compressed()
    _, adapter = adapted(model, RankAdaptation())
    state = adapter.state_dict()
    state["effects"] = state["effects"][:-1]
    with pytest.raises(ValueError, match="Load the model of the same checkpoint first"):
        adapter.load_state_dict(state)


def test_accumulated_batches_count_as_one():
    ends = []
    for parts in (1, 4):
        model, inputs = compressed()
        model.double()
        settings = RankAdaptation(target_parameters=target(model, 0.5), early=2, late=8, cut_every=2)
        optimizer, adapter = adapted(model, settings)
        train(model, optimizer, adapter, inputs, STEPS, parts)
        ends.append(model.state_dict())
    assert ends[0].keys() == ends[1].keys()
    for key, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][key], atol=1e-7, rtol=1e-5)


def test_models_in_sixteen_bits_keep_exact_gates():
    model, inputs = compressed(dtype=torch.bfloat16)
    optimizer, adapter = adapted(model, RankAdaptation(target_parameters=target(model, 0.5), early=2, late=8))
    train(model, optimizer, adapter, inputs, STEPS - 1)
    assert {gate.dtype for gate in adapter.table.gates} == {torch.float32}
    adapter.finish()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


class NoHostReads(TorchDispatchMode):
    """Fails where a value would have to come from the device, which a CUDA graph cannot hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [1, 6], ids=["early", "late"])
def test_nothing_is_read_from_the_device_between_cuts(steps):
    model, inputs = compressed()
    settings = RankAdaptation(target_parameters=target(model, 0.5), early=4, late=8, cut_every=8)
    optimizer, adapter = adapted(model, settings)
    train(model, optimizer, adapter, inputs, steps)
    loss = model(**inputs).loss
    loss.backward()
    with NoHostReads():
        adapter.before_step(loss)
        adapter.after_step()


@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_pressure_moves_gates_down_by_its_part_of_their_rate(gamma):
    model, inputs = compressed()
    _, adapter = adapted(model, RankAdaptation(gamma=gamma, early=10, late=0, cut_every=12))
    loss = model(**inputs).loss
    loss.backward()
    adapter.before_step(loss)
    adapter.after_step()  # without the optimizer's own step
    fall = 1 - adapter.table.flat()
    assert fall.mean().item() == pytest.approx(gamma * 1e-3, rel=1e-3, abs=1e-9)
    assert (fall >= 0).all()


def test_pressure_takes_weak_ranks_first_and_none_too_fast():
    model, inputs = compressed()
    optimizer, adapter = adapted(model, RankAdaptation(gamma=0.5, early=10, late=0, cut_every=5, threshold=0.0))
    train(model, optimizer, adapter, inputs, 5)
    for core in adapter.table.layers.values():
        for gate in core.rank_gates():
            assert (gate == 1).all()  # just folded
    loss = model(**inputs).loss
    loss.backward()
    adapter.before_step(loss)
    adapter.after_step()
    falls = adapter.table.split(1 - adapter.table.flat())
    assert all((fall.diff() >= 0).all() for fall in falls)  # sorted by strength
    assert max(fall.max().item() for fall in falls) == pytest.approx(0.5e-3, rel=1e-2)
