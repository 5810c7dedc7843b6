"""training/cuda_graphs/step.py: replays do to the bit what the plain loop does; what cannot be one is counted.

On a CPU a tape stands in for CUDA graphs; test_graphed_step_gpu.py has the real ones.
"""

import gc
import io
import logging

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from hf_comera import GraphedStep, size_report
from hf_comera.modules import TensorTrainModule
from tests.architectures import ARCHITECTURES
from tests.training.graphed_runs import (
    OPTIMIZERS,
    STEPS,
    Run,
    Without,
    assert_equal_states,
    assert_same,
    batches_of,
    sentences,
)
from tests.training.tape_capture import use_tape


@pytest.fixture
def tape(monkeypatch):
    use_tape(monkeypatch)


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
def test_after_a_reset_smaller_batches_are_recorded_too():
    run = Run(num_warmup_steps=1).by_graph(sentences([8, 8, 8]))
    run.step.reset()
    run.by_graph(sentences([8, 8, 8], rows=1))
    assert (run.step.num_captures, run.step.num_replays, run.step.num_eager) == (2, 4, 0)
    assert run.step._capture.num_forgotten == 1


@pytest.mark.usefixtures("tape")
def test_shapes_beyond_the_limit_run_as_usual(monkeypatch):
    monkeypatch.setattr("hf_comera.training.cuda_graphs.step.MAX_GRAPHS", 2)
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
    assert "recording a step failed with RuntimeError: the step reads a value of a tensor" in graphed.step.reason
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("tape")
def test_what_a_graph_uses_from_outside_is_kept_and_nothing_else():
    batches = batches_of()
    run = Run(part=0.5, total_steps=40).by_graph(batches[:3])
    gc.collect()
    before = places(thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    run.by_graph(batches[3:4])
    assert run.step.num_replays == 1
    kept = places(run.step._capture.watch.tensors())
    state = [value for values in run.optimizer.state.values() for value in values.values()]
    family = next(iter(run.optimizer._shape_groups.values()))[0][1]
    indices = [mask for mask in family.live if mask is not None]
    adapter = [run.adapter.effects, run.adapter.strengths, run.adapter.loss_sums]
    assert places([*run.model.parameters(), *state, *adapter, *indices]) <= kept
    assert len(kept - before) <= 5, "some that autograd and CPU kernels make from numbers"


def places(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.usefixtures("tape")
def test_generators_of_the_models_own_reach_the_capture():
    generators = [torch.Generator(), torch.Generator()]
    assert Run(generators=generators).step._capture.generators == generators


def test_without_a_gpu_it_is_the_plain_loop(caplog):
    batches = batches_of()
    plain, graphed = Run(part=0.5).plainly(batches), Run(part=0.5)
    torch.manual_seed(1)
    graphed.by_graph(batches)
    assert_same(plain, graphed)
    assert graphed.step.eager_steps == {graphed.step.reason: STEPS}
    assert "CUDA graphs need a CUDA device" in caplog.text


def test_gradients_of_a_loss_with_weights_are_dropped_too():
    run, head = Run(), torch.nn.Linear(1, 1, bias=False)
    seen = []
    optimizer = torch.optim.SGD([*run.model.parameters(), *head.parameters()], lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(head.weight.grad.item()))
    step = GraphedStep(run.model, optimizer, compute_loss=lambda b: head(run.model(**b).loss.view(1, 1)).sum())
    run.model.eval()
    for _ in range(3):
        step(batches_of()[0])
    assert seen == [seen[0]] * 3


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
    AcceleratorState._reset_state(True)  # which may have the precision of another test
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
