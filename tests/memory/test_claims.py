"""hf_comera/memory/claims.py: what is rebuilt, packed and kept; what is never stored in FP8, and how near that is."""

import pytest
import torch
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.memory import ActivationPolicy, claims
from hf_comera.memory.claims import Claims, covers_storage, storage_bytes
from hf_comera.memory.lineage import Lineage, Place
from hf_comera.memory.sources import Kept, Packed, Rebuilt, Whole
from hf_comera.ops.bit_mask import BitMask
from hf_comera.ops.fp8_activations import Fp8Tensor
from tests.architectures import ARCHITECTURES, every_architecture
from tests.memory.policy_runs import RANK, Of, error, run
from tests.memory.test_session_models import model_of

FP8 = ActivationPolicy(rest="fp8", min_bytes=0)


@pytest.mark.parametrize(
    ("view", "covers"),
    [
        (lambda base: base, True),
        (lambda base: base.t(), True),
        (lambda base: base.view(2, 2, 6).permute(2, 0, 1), True),
        (lambda base: base[:, None], True),
        (lambda base: base[1:], False),
        (lambda base: base[:3], False),
        (lambda base: base[:, ::2], False),
        (lambda base: base[None].expand(2, 4, 6), False),
        (lambda base: base.as_strided((4, 6), (5, 1)), False),
    ],
)
def test_covers_storage(view, covers):
    tensor = view(torch.randn(4, 6))
    assert covers_storage(Place.of(tensor), tensor) == covers


def test_a_place_of_another_dtype_does_not_cover_the_storage():
    tensor = torch.randn(4, 6)
    assert not covers_storage(Place.of(tensor.view(torch.int32)), tensor)
    assert storage_bytes(tensor[1:]) == 96


def claimed(tensor, policy, **kwargs):
    found = Claims(policy, Lineage())
    return found.claim(found.lineage.node(tensor), tensor, **kwargs)


def test_sources_of_tensors_that_nothing_is_known_of():
    activation = torch.randn(8, 16, requires_grad=True) * 2
    assert type(claimed(activation, RANK)) is Kept
    assert type(claimed(activation, FP8).stored) is Fp8Tensor
    assert claimed(activation, FP8).stored.scales.dim() == 2
    assert claimed(activation, FP8, for_product=True).stored.scales.dim() == 0
    assert type(claimed(activation > 0, RANK).stored) is BitMask
    assert type(claimed(activation > 0, ActivationPolicy(dropout="keep", min_bytes=0))) is Kept
    for small in (activation, activation > 0):
        assert type(claimed(small, ActivationPolicy(rest="fp8"))) is Kept
    for other in (activation.detach(), activation[:, 0].clone(), (activation * 10).long(), activation[1:]):
        assert type(claimed(other, FP8)) is Kept
    assert type(Claims(FP8, Lineage()).keep(activation)) is Kept
    assert type(Claims(FP8, Lineage()).keep_whole(activation)) is Whole


def test_one_source_for_all_who_ask():
    found, tensor = Claims(FP8, Lineage()), torch.randn(8, 16, requires_grad=True) * 2
    node = found.lineage.node(tensor)
    source = found.claim(node, tensor)
    assert found.claim(node, tensor.view(16, 8)) is source
    assert found.keep(tensor) is source
    assert type(source) is Packed
    assert list(found.sources) == [source]
    del source
    assert node.find_source() is None
    assert list(found.sources) == []


class Recorded:
    """Sources of a module's saved tensors, with what was stored in FP8."""

    def __init__(self, monkeypatch):
        self.stored, self.sources = [], []
        for name in ("store_by_group", "store_by_tensor"):
            monkeypatch.setattr(claims, name, self._watched(getattr(claims, name)))
        note = Claims.note
        monkeypatch.setattr(Claims, "note", lambda *args: self.sources.append(note(*args)) or self.sources[-1])

    def _watched(self, store):
        return lambda tensor: self.stored.append(tensor.detach()) or store(tensor)


def square_of_a_spread_row(module, x):
    row = x[:1] * 1.5
    return row.expand(4, 6, 8).clone().square()


CHAINS = {  # what is computed, and the longest chain of tensors that are rebuilt for it
    "function of a saved one": (lambda module, x: module.second(functional.gelu(module.first(x))), 1),
    "two": (lambda module, x: module.second(functional.gelu(module.first(x)) * 2 + 1), 3),
    "of an unknown one": (lambda module, x: torch.einsum("abc->acb", x).exp(), 0),
    "of a much smaller one": (square_of_a_spread_row, 1),
    "of a parameter": (lambda module, x: (torch.ones(4, 6, 8) * module.first.bias).square(), 2),
}


@pytest.mark.parametrize(("use", "depth"), CHAINS.values(), ids=CHAINS)
def test_how_far_rebuilding_goes(use, depth, monkeypatch):
    recorded = Recorded(monkeypatch)
    for allowed in range(5):
        recorded.sources.clear()
        policy = ActivationPolicy(min_bytes=0, depth=allowed)
        run(Of(use), {"x": torch.randn(4, 6, 8, requires_grad=True)}, policy)
        found = max((source.depth for source in recorded.sources if type(source) is Rebuilt), default=0)
        assert found == (depth if allowed >= depth else found)
        assert found <= allowed


def bert(hidden=256, compressed=False, vocabulary=500):
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * hidden,
    )
    if compressed:
        return get_comera_model(BertForMaskedLM, ComeraConfig(rank=16), config=config).train()
    return BertForMaskedLM(config).train()


def batch(rows=4, tokens=64, vocabulary=500):
    ids = torch.randint(vocabulary, (rows, tokens))
    mask = torch.ones_like(ids)
    mask[0, tokens // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@pytest.mark.parametrize(
    ("compressed", "policy", "most"),
    [  # of the bytes that are kept without a policy
        (False, "fp8", 0.45),
        (False, "rank", 0.75),
        (False, "rank+fp8", 0.4),
        (True, "rank", 0.35),
        (True, "rank+fp8", 0.2),
    ],
)
def test_bytes_and_errors_at_a_real_size(compressed, policy, most):
    model, inputs = bert(compressed=compressed), batch()
    plain = run(model, inputs, None)
    found = run(model, inputs, policy)
    assert found.saved_bytes < most * plain.saved_bytes
    assert error(found, plain) < (0.08 if "fp8" in policy else 1e-12)


@pytest.mark.parametrize("policy", ["fp8", "rank+fp8"])
@pytest.mark.parametrize("compressed", [False, True], ids=["dense", "compressed"])
def test_what_is_never_stored_in_fp8(compressed, policy, monkeypatch):
    """Parameters and what is made of them, ids, masks, statistics, logits and what the loss makes of them."""
    model, inputs = bert(compressed=compressed), batch()
    inputs["labels"] = inputs["labels"].clone()
    inputs["labels"][0, 0] = -100  # as many labelled tokens as the model is wide would look like a weight
    recorded, weights = Recorded(monkeypatch), {parameter.shape for parameter in model.parameters()}
    run(model, inputs, policy)
    assert recorded.stored
    for tensor in recorded.stored:
        assert tensor.shape not in weights
        assert tensor.numel() >= 4 * 64 * 16
        assert 500 not in tensor.shape


@pytest.mark.parametrize("is_compressed", [True, False], ids=["compressed", "dense"])
@every_architecture
def test_errors_on_every_architecture(architecture, is_compressed):
    model, inputs = model_of(architecture, is_compressed, 0.1), architecture.training_inputs()
    plain = run(model, inputs, None)
    for policy in (FP8, ActivationPolicy(min_bytes=0, rest="fp8", attention="recompute")):
        found = run(model, inputs, policy)
        assert torch.equal(found.loss, plain.loss)
        assert 0 < error(found, plain) < 0.15
        assert found.saved_bytes < 0.75 * plain.saved_bytes


def test_errors_under_autocast():
    architecture = ARCHITECTURES["gpt2"]
    model, inputs = model_of(architecture, True, 0.1), architecture.training_inputs()
    plain = run(model, inputs, None, autocast=True)
    assert 0 < error(run(model, inputs, FP8, autocast=True), plain) < 0.15
