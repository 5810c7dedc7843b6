"""hf_comera/training/graphed_step.py: replays do to the bit what the plain loop does; what cannot be one is counted.

On a CPU a tape stands in for CUDA graphs; the tests marked ``gpu`` have the real ones.
"""

import copy
import io
import logging

import pytest
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_flatten_with_path

from hf_comera import (
    ComeraConfig,
    GraphedStep,
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
from tests.training.tape_capture import use_tape

OPTIMIZERS = {
    "tt_muon": lambda model: TTMuon(model, 1e-3),
    "fused adamw": lambda model: torch.optim.AdamW(comera_param_groups(model, 1e-3), fused=True),
}
STEPS = 9


@pytest.fixture
def tape(monkeypatch):
    use_tape(monkeypatch)


class Run:
    """A training of a tiny model, by graphs or by a plain loop."""

    def __init__(self, name="bert-mlm", optimizer="tt_muon", part=None, device="cpu", total_steps=STEPS, **settings):
        torch.manual_seed(0)
        architecture = ARCHITECTURES[name]
        self.model = get_comera_model(
            architecture.auto_class, ComeraConfig(rank=6), config=architecture.new_config()
        ).to(device)
        if part is not None:
            add_rank_gates(self.model)
        self.optimizer = OPTIMIZERS[optimizer](self.model) if isinstance(optimizer, str) else optimizer(self.model)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.adapter = None if part is None else self._adapter(part, total_steps)
        self.step = GraphedStep(self.model, self.optimizer, self.adapter, max_grad_norm=1.0, **settings)
        self.model.train()
        torch.manual_seed(1)
        self.losses = []

    def _adapter(self, part, total_steps):
        report = size_report(self.model)
        size = int(report.parameters - (1 - part) * report.compressed_parameters)
        settings = RankAdaptation(target_parameters=size, early=0.3, late=0.5, cut_every=0.2, beta=0.1)
        return RankAdapter(self.model, self.optimizer, settings, total_steps=total_steps)

    def by_graph(self, batches):
        for batch in batches:
            self.losses.append(self.step(batch).item())
            self.scheduler.step()
        return self

    def plainly(self, batches):
        for batch in batches:
            loss = self.model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if self.adapter is not None:
                self.adapter.before_step(loss)
            self.optimizer.step()
            if self.adapter is not None:
                self.adapter.after_step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses.append(loss.item())
        return self

    def state(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": self.losses}
        state |= {"scheduler": self.scheduler.state_dict(), "random": torch.get_rng_state()}
        return copy.deepcopy(state | ({"adapter": self.adapter.state_dict()} if self.adapter else {}))

    def load(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.adapter is not None:
            self.adapter.load_state_dict(state["adapter"])
        torch.set_rng_state(state["random"])
        self.losses = list(state["losses"])
        return self


def batches_of(name="bert-mlm", count=STEPS):
    torch.manual_seed(2)
    return [ARCHITECTURES[name].training_inputs() for _ in range(count)]


def assert_same(one, other):
    assert_equal_states(one.state(), other.state())


def assert_equal_states(one, other):
    (ones, structure), (others, other_structure) = tree_flatten_with_path(one), tree_flatten_with_path(other)
    assert structure == other_structure
    for (path, a), (_, b) in zip(ones, others, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b), (path, a, b)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["bert-mlm", "gpt2", "t5", "vit", "bert-classifier"])
@pytest.mark.usefixtures("tape")
def test_every_number_is_that_of_the_plain_loop(name, optimizer):
    batches = batches_of(name)
    plain = Run(name, optimizer).plainly(batches)
    graphed = Run(name, optimizer).by_graph(batches)
    assert (graphed.step.num_warmups, graphed.step.num_captures, graphed.step.num_replays) == (3, 1, STEPS - 3)
    assert not graphed.step.num_eager
    assert_same(plain, graphed)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.usefixtures("tape")
def test_ranks_are_trained_and_cut_as_in_the_plain_loop(optimizer):
    batches = batches_of(count=40)
    plain = Run(optimizer=optimizer, part=0.4, total_steps=40).plainly(batches)
    graphed = Run(optimizer=optimizer, part=0.4, total_steps=40).by_graph(batches)
    assert graphed.step.num_captures >= 4, "recorded anew after cuts and at the late stage"
    assert graphed.step.num_replays > 20
    assert_same(plain, graphed)
    for run in (plain, graphed):
        run.adapter.finish()
    assert size_report(graphed.model).parameters == size_report(plain.model).parameters
    more = batches_of(count=5)
    assert_same(Without(plain).plainly(more), Without(graphed).by_graph(more))


class Without(Run):
    """The rest of a run, after its rank adaptation has ended."""

    def __init__(self, run):
        self.__dict__.update(run.__dict__)
        self.adapter = None
        self.step = GraphedStep(self.model, self.optimizer, max_grad_norm=1.0)
        torch.manual_seed(4)


@pytest.mark.parametrize("part", [None, 0.4], ids=["fixed", "ranks"])
@pytest.mark.parametrize("place", [2, 5, 17])
@pytest.mark.usefixtures("tape")
def test_a_checkpoint_from_between_replays_resumes_to_the_bit(part, place):
    batches = batches_of(count=24)
    whole = Run(part=part, total_steps=24).by_graph(batches[:place])
    file = io.BytesIO()
    torch.save(whole.state(), file)
    whole.by_graph(batches[place:])
    file.seek(0)
    resumed = Run(part=part, total_steps=24).load(torch.load(file, weights_only=False)).by_graph(batches[place:])
    assert resumed.step.num_replays
    assert_same(whole, resumed)
    assert_same(whole, Run(part=part, total_steps=24).plainly(batches))


@pytest.mark.usefixtures("tape")
def test_a_state_loaded_on_the_way_is_gone_on_from():
    batches = batches_of(count=12)
    run = Run().by_graph(batches[:2])
    state = run.state()
    expected = run.by_graph(batches[2:]).state()
    assert run.step.num_replays
    again = run.load(state).by_graph(batches[2:])
    assert_equal_states(again.state(), expected)
    assert again.step.num_captures == 2


@pytest.mark.usefixtures("tape")
def test_new_parameters_are_recorded_anew():
    batches = batches_of(count=12)
    plain, graphed = Run().plainly(batches[:6]), Run().by_graph(batches[:6])
    for run in (plain, graphed):
        layer = next(module for module in run.model.modules() if isinstance(module, TensorTrainModule))
        layer.core_0.data = 2 * layer.core_0.data
    torch.set_rng_state(random_state := torch.get_rng_state())
    plain.plainly(batches[6:])
    torch.set_rng_state(random_state)
    assert_same(plain, graphed.by_graph(batches[6:]))
    assert graphed.step.num_captures == 2


@pytest.mark.usefixtures("tape")
def test_evaluation_between_replays_sees_the_trained_weights():
    batches = batches_of()
    plain, graphed = Run(), Run()
    for batch in batches:
        results = []
        random_state = torch.get_rng_state()
        for run, train in ((plain, plain.plainly), (graphed, graphed.by_graph)):
            torch.set_rng_state(random_state)
            train([batch])
            with torch.no_grad():  # without eval(), which makes layers build anew
                results.append(run.model(**batch).loss.item())
        assert results[0] == results[1]
    assert graphed.step.num_replays


def sentences(lengths, rows=2):
    torch.manual_seed(3)
    batches = []
    for length in lengths:
        ids = torch.randint(5, 241, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return batches


@pytest.mark.parametrize("name", ["bert-mlm", "roberta", "gpt2", "t5"])
@pytest.mark.usefixtures("tape")
def test_padding_to_buckets_changes_no_loss(name):
    batches = sentences([5, 12, 8, 7, 9, 16, 3, 4, 11, 10, 6, 15])
    settings = {"buckets": (16, 8), "num_warmup_steps": 2}
    plain, graphed = Run(name), Run(name, **settings)
    for run in (plain, graphed):
        run.model.eval()
    plain.plainly(batches)
    graphed.by_graph(batches)
    assert (graphed.step.num_captures, graphed.step.num_replays, graphed.step.num_eager) == (2, 8, 0)
    torch.testing.assert_close(graphed.losses, plain.losses, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("tape")
def test_a_batch_without_a_mask_gets_one_when_it_is_padded():
    batches = [{"input_ids": batch["input_ids"], "labels": batch["input_ids"]} for batch in sentences([5, 7, 6, 8, 5])]
    plain, graphed = Run(), Run(buckets=(8,))
    for run in (plain, graphed):
        run.model.eval()
    torch.testing.assert_close(graphed.by_graph(batches).losses, plain.plainly(batches).losses, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("tape")
def test_what_fits_no_graph_runs_as_usual_and_is_counted(caplog):
    batches = sentences([8, 8, 8, 8]) + sentences([8, 8], rows=1) + sentences([9, 8])
    plain, graphed = Run(), Run(buckets=(8,))
    for run in (plain, graphed):
        run.model.eval()
    with caplog.at_level(logging.WARNING):
        graphed.by_graph(batches)
    torch.testing.assert_close(graphed.losses, plain.plainly(batches).losses, rtol=1e-4, atol=0)
    assert graphed.step.eager_steps == {
        "the batch has fewer rows than others": 2,
        "a sequence is longer than the largest bucket": 1,
    }
    assert graphed.step.num_eager == 3
    assert graphed.step.num_replays == 2
    assert len(caplog.records) == 2


@pytest.mark.usefixtures("tape")
def test_shapes_beyond_the_limit_run_as_usual(monkeypatch):
    monkeypatch.setattr("hf_comera.training.graphed_step.MAX_GRAPHS", 2)
    run = Run(num_warmup_steps=1).by_graph(sentences([5, 6, 7, 5, 6, 7]))
    assert (run.step.num_captures, run.step.num_eager) == (2, 2)
    assert "use fewer buckets" in next(iter(run.step.eager_steps))


@pytest.mark.usefixtures("tape")
def test_a_step_that_reads_from_the_device_is_not_recorded(caplog):
    batches = batches_of()

    def compute_loss(batch):
        loss = graphed.model(**batch).loss
        return loss if loss.item() > 0 else -loss

    plain = Run().plainly(batches)
    graphed = Run(compute_loss=compute_loss)
    graphed.by_graph(batches)
    assert_same(plain, graphed)
    assert graphed.step.num_captures == graphed.step.num_replays == 0
    assert graphed.step.num_eager == STEPS - 3
    assert "recording a step failed with RuntimeError: aten::_local_scalar_dense" in graphed.step.reason
    assert len(caplog.records) == 1


def test_without_a_gpu_it_is_the_plain_loop(caplog):
    batches = batches_of()
    plain, graphed = Run(part=0.5).plainly(batches), Run(part=0.5)
    torch.manual_seed(1)
    graphed.by_graph(batches)
    assert_same(plain, graphed)
    assert graphed.step.eager_steps == {graphed.step.reason: STEPS}
    assert "CUDA graphs need a CUDA device" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda model: torch.optim.AdamW(model.parameters(), 1e-3),
    ],
    ids=["sgd", "adamw"],
)
@pytest.mark.usefixtures("tape")
def test_an_optimizer_that_works_on_the_host_runs_as_usual(make):
    batches = batches_of()
    plain = Run(optimizer=make).plainly(batches)
    graphed = Run(optimizer=make).by_graph(batches)
    assert_same(plain, graphed)
    assert "capturable=True or fused=True" in graphed.step.reason


@pytest.mark.usefixtures("tape")
def test_with_accelerate():
    batches = batches_of()
    plain, run = Run().plainly(batches), Run()
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler = accelerator.prepare(run.model, run.optimizer, run.scheduler)
    step = GraphedStep(model, optimizer, max_grad_norm=1.0)
    torch.manual_seed(1)
    for batch in batches:
        run.losses.append(step(batch).item())
        scheduler.step()
    assert step.num_replays == STEPS - 3
    assert_same(plain, run)


@pytest.mark.usefixtures("tape")
def test_bfloat16_autocast_is_part_of_the_graph():
    batches = batches_of()
    plain, graphed = Run(), Run()
    for train in (plain.plainly, graphed.by_graph):
        torch.manual_seed(1)
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16):
                train([batch])
    assert graphed.step.num_replays == STEPS - 3
    assert_same(plain, graphed)


def test_a_batch_without_labels_is_refused():
    with pytest.raises(ValueError, match=r"returned no loss for a batch of .'input_ids'.*Add labels"):
        Run().by_graph([ARCHITECTURES["bert-mlm"].inputs()])


def cuda(batches):
    return [{name: value.cuda() for name, value in batch.items()} for batch in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("part", [None, 0.4], ids=["fixed", "ranks"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_a_gpu_replays_train_as_the_plain_loop(optimizer, part):
    batches = cuda(batches_of(count=30))
    settings = {"optimizer": optimizer, "part": part, "device": "cuda", "total_steps": 30}
    plain, graphed = Run(**settings).plainly(batches), Run(**settings).by_graph(batches)
    assert graphed.step.reason is None
    assert graphed.step.num_replays >= 10
    assert not graphed.step.num_eager
    torch.testing.assert_close(graphed.losses, plain.losses, rtol=1e-3, atol=0)


@pytest.mark.gpu
def test_on_a_gpu_buckets_and_batches_from_the_host():
    batches = sentences([5, 12, 8, 7, 9, 16, 3, 4, 11, 10, 6, 15])
    plain, graphed = Run(device="cuda"), Run(device="cuda", buckets=(8, 16), num_warmup_steps=2)
    for run in (plain, graphed):
        run.model.eval()
    graphed.by_graph(batches)
    assert (graphed.step.num_captures, graphed.step.num_replays, graphed.step.reason) == (2, 8, None)
    torch.testing.assert_close(graphed.losses, plain.plainly(cuda(batches)).losses, rtol=1e-3, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [None, 0.4], ids=["fixed", "ranks"])
def test_on_a_gpu_a_checkpoint_resumes(part):
    batches = cuda(batches_of(count=24))
    settings = {"part": part, "device": "cuda", "total_steps": 24}
    whole = Run(**settings)
    whole.model.eval()  # the state of the device's generator is not in this checkpoint
    state = whole.by_graph(batches[:10]).state()
    whole.by_graph(batches[10:])
    resumed = Run(**settings).load(state)
    resumed.model.eval()
    resumed.by_graph(batches[10:])
    assert resumed.step.num_replays
    torch.testing.assert_close(resumed.losses, whole.losses, rtol=1e-3, atol=0)


@pytest.mark.gpu
def test_on_a_gpu_dropout_differs_from_replay_to_replay():
    (batch,) = cuda(batches_of(count=1))
    run = Run(device="cuda", optimizer=lambda model: TTMuon(model, 1e-12)).by_graph([batch] * 8)
    assert run.step.num_replays == 5
    assert len(set(run.losses[3:])) == 5


@pytest.mark.gpu
def test_on_a_gpu_a_host_read_is_counted_and_trained():
    def compute_loss(batch):
        loss = run.model(**batch).loss
        return loss if loss.item() > 0 else -loss

    run = Run(device="cuda", compute_loss=compute_loss)
    run.model.eval()
    run.by_graph(cuda(batches_of()))
    assert "recording a step failed" in run.step.reason
    assert run.step.num_eager == STEPS - 3
