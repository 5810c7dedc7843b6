"""hf_comera/training/cuda_graphs/step.py on a GPU: replays of real CUDA graphs train as the plain loop does."""

import pytest
import torch

from hf_comera import TTMuon
from tests.training.graphed_runs import OPTIMIZERS, STEPS, Run, batches_of, sentences


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
