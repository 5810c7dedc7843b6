"""Rank adaptation where something is unusual: losses that are no numbers, optimizers, wrappers, accumulation."""

import gc

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainingArguments

from hf_comera import (
    ComeraConfig,
    ComeraTrainer,
    RankAdaptation,
    RankAdapter,
    TTMuon,
    add_rank_gates,
    get_comera_model,
)
from hf_comera.modules import TTLinear
from hf_comera.training.ranks.gates import find_ddp, rewrap
from tests.architectures import ARCHITECTURES


def linear(**settings):
    layer = TTLinear(24, 24, ranks=6, **settings)
    add_rank_gates(layer)
    return layer


def adapted(settings=None, make=lambda layer: TTMuon(layer, 1e-3), steps=6):
    layer = linear()
    optimizer = make(layer)
    return layer, optimizer, RankAdapter(layer, optimizer, settings or RankAdaptation(), total_steps=steps)


def train(layer, optimizer, adapter, steps, factor=1.0):
    for _ in range(steps):
        loss = layer(torch.randn(8, 24)).square().mean()
        loss.backward()
        adapter.before_step(loss * factor)
        optimizer.step()
        adapter.after_step()
        optimizer.zero_grad()


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_losses_that_are_no_numbers_are_left_out(factor):
    layer, optimizer, adapter = adapted()
    train(layer, optimizer, adapter, 1)
    before = adapter.smoothed_loss.item()
    train(layer, optimizer, adapter, 1, factor)
    assert adapter.smoothed_loss.item() == before


def test_without_an_early_stage_the_first_loss_is_the_wanted_one():
    settings = RankAdaptation(target_parameters=700, early=0, late=6)
    layer, optimizer, adapter = adapted(settings)
    train(layer, optimizer, adapter, 1)
    assert adapter.wanted_loss.item() == adapter.smoothed_loss.item()


OF_TORCH = {
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
    **{name: {} for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop", "SGD")},
}


class Averaging(torch.optim.SGD):
    """Keeps something that nobody knows."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mystery"] = parameter.detach().clone()


@pytest.mark.parametrize("name", OF_TORCH)
def test_optimizers_of_torch_train_across_cuts(name):
    settings = RankAdaptation(target_parameters=200, early=1, late=4, cut_every=1)
    layer, optimizer, adapter = adapted(
        settings, lambda layer: getattr(torch.optim, name)(layer.parameters(), lr=1e-3, **OF_TORCH[name])
    )
    train(layer, optimizer, adapter, 6)
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert sum(layer.ranks) < 26


@pytest.mark.parametrize(
    "make",
    [
        lambda layer: torch.optim.Adafactor(layer.parameters()),
        lambda layer: Averaging(layer.parameters(), lr=0.1),
    ],
)
def test_optimizers_of_unknown_state_are_refused_at_the_first_step(make):
    layer, optimizer, adapter = adapted(RankAdaptation(early=2, late=2, cut_every=2), make)
    with pytest.raises(
        ValueError, match=r"keeps '.*' of shape .* How that changes with its ranks is not known\. Use TTMuon"
    ):
        train(layer, optimizer, adapter, 1)


def test_diverged_layers_are_named():
    layer, optimizer, adapter = adapted(RankAdaptation(early=2, late=2, cut_every=1))
    layer.core_0.data[0, 0, 0] = torch.nan
    optimizer.step = lambda: None
    with pytest.raises(ValueError, match="hold NaN or infinity: the training diverged"):
        train(layer, optimizer, adapter, 1)


def test_a_state_of_other_ranks_is_refused():
    layer, optimizer, adapter = adapted(RankAdaptation(target_parameters=200, early=1, late=4, cut_every=1))
    train(layer, optimizer, adapter, 6)
    cut = adapter.state_dict()
    *_, uncut = adapted()
    with pytest.raises(ValueError, match=r"of 5 bonds with \d+ ranks in all, but the model has 5 with 26"):
        uncut.load_state_dict(cut)


def test_other_settings_are_gone_on_with_and_named(caplog):
    *_, adapter = adapted(RankAdaptation(target_parameters=200))
    *_, other = adapted(RankAdaptation(target_parameters=210, early=0.3))
    other.load_state_dict(adapter.state_dict())
    assert "which were target_parameters=200, early=0.4." in caplog.text


def test_a_state_without_settings_is_gone_on_with(caplog):
    *_, adapter = adapted()
    state = adapter.state_dict()
    del state["settings"]
    adapter.load_state_dict(state)
    assert "does not say its settings. Training goes on with RankAdaptation(" in caplog.text


def test_state_that_comes_later_is_refused_before_a_cut():
    layer, optimizer, adapter = adapted(RankAdaptation(target_parameters=200, early=1, late=4, cut_every=2))
    train(layer, optimizer, adapter, 2)
    optimizer.state[layer.core_0]["mystery"] = torch.ones_like(layer.core_0)
    cores = [core.detach().clone() for core in layer.cores()]
    optimizer.step = lambda: None
    with pytest.raises(ValueError, match="keeps 'mystery'"):
        train(layer, optimizer, adapter, 2)
    assert all(torch.equal(new, old) for new, old in zip(layer.cores(), cores, strict=True))


def test_a_step_without_its_loss_is_refused():
    layer, optimizer, adapter = adapted()
    train(layer, optimizer, adapter, 1)
    with pytest.raises(ValueError, match=r"after_step\(\) without before_step\(loss\)"):
        adapter.after_step()


def test_a_bare_ratio_is_refused():
    layer = linear()
    with pytest.raises(ValueError, match=r"rank_adaptation=0\.02 is needed as a RankAdaptation"):
        RankAdapter(layer, TTMuon(layer, 1e-3), 0.02, total_steps=6)


def test_a_training_of_another_length_is_not_resumed():
    *_, adapter = adapted()
    *_, other = adapted(steps=7)
    with pytest.raises(ValueError, match="total_steps=7, but the training to resume was one of 6"):
        other.load_state_dict(adapter.state_dict())


@pytest.mark.parametrize("state", [{}, {"step": 1, "total_steps": 6}])
def test_states_of_something_else_are_refused(state):
    *_, adapter = adapted()
    with pytest.raises(ValueError, match=r"lacks \[.*'strengths'.*Load what RankAdapter.state_dict"):
        adapter.load_state_dict(state)


def test_a_loss_is_needed():
    *_, adapter = adapted()
    with pytest.raises(ValueError, match="loss=None is needed as a tensor"):
        adapter.before_step(None)


def test_states_are_snapshots():
    layer, optimizer, adapter = adapted(RankAdaptation(target_parameters=200, early=1, late=4, cut_every=1))
    state = adapter.state_dict()
    train(layer, optimizer, adapter, 6)
    assert state["history"]["steps"] == [0]


def test_accumulated_batches_of_accelerate_are_one_step():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    layer = linear()
    layer, optimizer = accelerator.prepare(layer, TTMuon(layer, 1e-3))
    adapter = RankAdapter(layer, optimizer, RankAdaptation(), total_steps=4)
    losses = []
    for _ in range(6):
        with accelerator.accumulate(layer):
            loss = layer(torch.randn(8, 24)).square().mean() * (1 + len(losses))
            losses.append(loss.item())
            accelerator.backward(loss)
            adapter.before_step(loss)
            optimizer.step()
            adapter.after_step()
            optimizer.zero_grad()
    assert adapter.step == 2
    first, second = sum(losses[:3]) / 3, sum(losses[3:]) / 3
    assert adapter.smoothed_loss.item() == pytest.approx((0.95 * first + second) / 1.95)


def test_replicas_see_the_gates():
    """As those of DataParallel do: their parameters are plain attributes."""
    layer = linear()
    replica = layer._replicate_for_data_parallel()
    for name, parameter in layer._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.detach() * 2)
    assert len(replica.rank_gates()) == 5


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    gc.collect()  # the destructor of a DDP object that outlives its group may wait for ever (gloo of torch 2.13)
    dist.destroy_process_group()


def test_ddp_keeps_its_settings_and_hooks(process_group):
    calls = []

    def count(state, bucket):
        calls.append(bucket)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    layer = linear()
    ddp = DistributedDataParallel(layer, bucket_cap_mb=3).eval()
    ddp.register_comm_hook(None, count)
    ddp.register_forward_hook(lambda *_: calls.append("forward"))
    rewrap(find_ddp(torch.compile(ddp, backend="eager")))  # Accelerate compiles around DDP
    ddp(torch.randn(2, 24)).sum().backward()
    assert calls[0] == "forward"
    assert len(calls) > 1
    assert ddp.bucket_bytes_cap == 3 * 2**20
    assert not ddp.training
    del ddp


def test_trackers_see_the_ranks(tmp_path):
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    architecture = ARCHITECTURES["bert-mlm"]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    rows = [{key: value[0] for key, value in architecture.training_inputs().items()} for _ in range(4)]
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path), max_steps=2, logging_steps=1, **quiet)
    trainer = ComeraTrainer(
        model=model, args=args, train_dataset=rows, callbacks=[Tracker()], rank_adaptation=RankAdaptation()
    )
    trainer.train()
    assert all("live_ranks" in logs for logs in seen if "loss" in logs)
    assert len(seen) >= 2
