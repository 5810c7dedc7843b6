"""Whole models with kernels for halves and embedding rows train and answer as they do in plain torch."""

from collections import Counter

import pytest
import torch

from hf_comera import ComeraConfig, add_rank_gates, get_comera_model
from hf_comera.modules import TensorTrainModule
from hf_comera.ops import use_kernels
from hf_comera.training.ranks.pruning import cut_ranks
from tests.architectures import ARCHITECTURES
from tests.integration.test_training_loops import CHECKPOINTING
from tests.training.graphed_runs import Run, batches_of
from tests.training.tape_capture import use_tape

LAUNCHES = ("tt_halves", "tt_halves_backward", "ttm_rows", "ttm_table_gradient")
PRODUCTS = ("low_rank_linear", "tiled_mlp")
"""One of them: of layers alone, or of a feed-forward block."""
# model, what is done to it, largest error relative to the norm
CASES = [
    pytest.param("bert-classifier", [], 1e-4, id="padding"),
    pytest.param("gpt2", [], 1e-4, id="tied-head"),
    pytest.param("t5", [], 1e-4, id="shared-embeddings"),
    pytest.param("bert-mlm", ["cut"], 1e-4, id="after-a-cut"),
    pytest.param("bert-mlm", ["gates", "cut"], 1e-4, id="gates-after-a-cut"),
    pytest.param("bert-classifier", ["checkpointing"], 1e-4, id="checkpointing"),
    pytest.param("bert-classifier", ["autocast"], 2e-2, id="autocast"),
    pytest.param("bert-classifier", ["bfloat16"], 5e-2, id="bfloat16"),
    pytest.param("bert-mlm", ["bfloat16", "gates", "cut"], 5e-2, id="bfloat16-gates-after-a-cut"),
]


def cut_one_rank(model):
    """The last rank of every bond goes."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TensorTrainModule)}
    kept = {name: [torch.arange(max(1, rank - 1)) for rank in layer.ranks] for name, layer in layers.items()}
    cut_ranks(layers, {name: [each.to(model.device) for each in bonds] for name, bonds in kept.items()})


def train(name, done, device):
    """Two steps of two batches each: losses, all gradients, and what the model answers then."""
    torch.manual_seed(0)
    architecture = ARCHITECTURES[name]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=6), config=architecture.new_config())
    model = model.to(device, torch.bfloat16 if "bfloat16" in done else torch.float32)
    if "gates" in done:
        add_rank_gates(model)
    if "checkpointing" in done:
        getattr(model, f"{CHECKPOINTING}_checkpointing_enable")({"use_reentrant": False})
    batches = [{key: value.to(device) for key, value in architecture.training_inputs().items()} for _ in range(4)]
    for batch in batches:
        batch["input_ids"][0, -3:] = model.config.pad_token_id or 0  # no gradient, where it is the padding
    results = []
    for step in range(2):
        for batch in batches[2 * step : 2 * step + 2]:
            with torch.autocast(device.type, torch.bfloat16, enabled="autocast" in done):
                loss = model(**batch).loss
            loss.backward()
            results.append(loss.detach())
        results += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        torch.optim.SGD(model.parameters(), 0.05).step()
        model.zero_grad()
        if step == 0 and "cut" in done:
            cut_one_rank(model)
    model.eval()
    with torch.no_grad():
        return [*results, model(**batches[0]).logits, model(**batches[1]).logits]


@pytest.mark.parametrize(("name", "done", "tolerance"), CASES)
def test_train_as_in_torch(name, done, tolerance, served, calls):
    found = train(name, done, served)
    counted = Counter(launch for launch, _ in calls)
    assert all(counted[launch] for launch in LAUNCHES), counted
    assert any(counted[launch] and counted[f"{launch}_backward"] for launch in PRODUCTS), counted
    assert counted["tt_halves"] <= 8, "one call for all layers, wherever they are not built alone"
    num_calls = len(calls)
    use_kernels(False)
    expected = train(name, done, served)
    assert len(calls) == num_calls
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).norm()
        assert error <= tolerance * max(other.double().norm(), 1e-3), (one.shape, error, other.norm())


def test_steps_with_kernels_go_on_a_tape(served, monkeypatch):
    if served.type != "cpu":
        pytest.skip("the next test has real graphs")
    batches = batches_of(count=4)
    plain = Run(num_warmup_steps=1).plainly(batches)
    use_tape(monkeypatch)
    taped = Run(num_warmup_steps=1).by_graph(batches)
    assert taped.step.num_replays == 3
    torch.testing.assert_close(taped.losses, plain.losses, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [None, 0.4], ids=["fixed", "ranks"])
def test_on_a_gpu_steps_with_kernels_are_captured(part, monkeypatch):
    batches = [{key: value.cuda() for key, value in batch.items()} for batch in batches_of(count=20)]
    settings = {"part": part, "device": "cuda", "total_steps": 20}
    plain = Run(**settings).plainly(batches)
    use_kernels()
    try:
        graphed = Run(**settings).by_graph(batches)
    finally:
        use_kernels(False)
    assert graphed.step.reason is None
    assert graphed.step.num_replays
    torch.testing.assert_close(graphed.losses, plain.losses, rtol=1e-3, atol=0)
