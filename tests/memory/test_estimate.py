"""The memory that is estimated is the memory that a training step takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, CLIPConfig, CLIPModel

from hf_comera import (
    ActivationPolicy,
    CoatAdamW,
    ComeraConfig,
    TTMuon,
    comera_param_groups,
    estimate_memory,
    get_comera_model,
    set_activation_policy,
)
from hf_comera.memory import SavedBytes
from hf_comera.memory.estimate import activation_bytes_by_megatron
from hf_comera.modules.halves_cache import note_parameter_edit
from tests.architectures import ARCHITECTURES, every_architecture
from tests.modules.conftest import small_chunks  # noqa: F401
from tests.operation_count import CountOperations

WORKER = Path(__file__).with_name("step_worker.py")
SMALL = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024}


def small_bert(**settings):
    config = BertConfig(**SMALL, vocab_size=2000)
    if not settings:
        return BertForSequenceClassification(config)
    return get_comera_model(BertForSequenceClassification, ComeraConfig(**settings), config=config)


@pytest.mark.parametrize("compressed", [False, True], ids=["dense", "compressed"])
@every_architecture
def test_activations_of_every_architecture_are_what_autograd_saves(architecture, compressed):
    model = architecture.new_model().train()
    if compressed:
        model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
        model.train()
    # many rows: where halves come from is not estimated to the byte
    batch = {name: value.repeat_interleave(8, 0) for name, value in architecture.training_inputs().items()}
    policies = {"keep": None, "rank+fp8": ActivationPolicy(storage="fp8", min_bytes=0)}
    estimate = estimate_memory(model, inputs=batch, policies=policies)
    model(**batch)  # makes tables that stay
    for name, policy in policies.items():
        set_activation_policy(model, policy)
        note_parameter_edit()  # as after a step: halves are built, and what they keep is counted
        with SavedBytes(model.parameters()) as saved:
            loss = model(**batch).loss
        assert loss.requires_grad
        assert estimate.policies[name].activations == pytest.approx(saved.total, rel=0.1)


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.SGD, TTMuon, CoatAdamW], ids=lambda make: make.__name__
)
def test_weights_gradients_and_optimizer_state_are_counted(make):
    model = small_bert(rank=8)
    optimizer = make(comera_param_groups(model, 1e-3) if make is CoatAdamW else _trained(model, make), lr=1e-3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    estimate = estimate_memory(model, batch_size=2, seq_len=16, optimizer=optimizer, policies=["keep"])
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert (estimate.weights, estimate.gradients) == (num_bytes + buffers, num_bytes)
    assert not optimizer.state
    model(input_ids=torch.zeros(2, 16, dtype=torch.long), labels=torch.zeros(2, dtype=torch.long)).loss.backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    optimizer.step()
    tensors = [item for state in optimizer.state.values() for item in state.values() if isinstance(item, torch.Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    assert estimate.optimizer == sum(storages.values())
    assert (
        estimate.policies["keep"].peak > estimate.weights + estimate.optimizer + estimate.policies["keep"].activations
    )


def _trained(model, make):
    return model if make is TTMuon else model.parameters()


def measured_and_estimated(case, policy):
    """Bytes that a step takes beyond what was there before it, in a process that gives freed memory back at once."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(WORKER), case, policy]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    return int(found[-2]), int(found[-1])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's VmHWM")
@pytest.mark.parametrize("policy", ["keep", "rank"])
@pytest.mark.parametrize(
    "case",
    [
        "bert-small",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "bert-tt", "gpt2", "llama", "t5")),
    ],
)
def test_the_peak_is_within_a_tenth_of_what_a_process_takes(case, policy):
    measured, estimated = measured_and_estimated(case, policy)
    assert estimated == pytest.approx(measured, rel=0.1)


class MegatronLayer(nn.Module):
    """A layer as in the paper: no fused attention, GELU, three dropouts."""

    def __init__(self, hidden, heads, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        seq, batch, hidden = x.shape
        y = self.norms[0](x)
        size = (seq, batch * self.heads, hidden // self.heads)
        query, key, value = (part(y).view(size).transpose(0, 1) for part in (self.query, self.key, self.value))
        scores = torch.bmm(query, key.transpose(1, 2)).mul(size[-1] ** -0.5)
        shares = functional.dropout(scores.softmax(-1), self.p)
        y = torch.bmm(shares, value).transpose(0, 1).reshape(seq, batch, hidden)
        x = x + functional.dropout(self.out(y), self.p)
        y = self.down(functional.gelu(self.up(self.norms[1](x))))
        return x + functional.dropout(y, self.p)


@pytest.mark.parametrize(("seq", "batch", "hidden", "heads"), [(128, 4, 256, 8), (64, 2, 512, 4)])
def test_activations_follow_the_formula_of_megatron(seq, batch, hidden, heads):
    layer = MegatronLayer(hidden, heads, 0.1).to(torch.bfloat16)
    x = torch.randn(seq, batch, hidden, dtype=torch.bfloat16, requires_grad=True)
    with SavedBytes(layer.parameters()) as saved:
        y = layer(x)
    assert y.requires_grad
    masks = 2 * seq * batch * hidden + heads * seq * seq * batch  # a CPU keeps them in bf16, the paper in one byte
    expected = activation_bytes_by_megatron(seq, batch, hidden, heads) + masks
    assert saved.total == pytest.approx(expected, rel=0.01)


def test_the_present_policy_comes_first_and_stays():
    model, policy = small_bert(rank=8), ActivationPolicy(min_bytes=2)
    set_activation_policy(model, policy)
    estimate = estimate_memory(model, batch_size=2, seq_len=16)
    assert list(estimate.policies) == ["now", "keep", "rank", "rank+fp8", "fp8"]
    set_activation_policy(model, "rank")
    assert list(estimate_memory(model, seq_len=16, policies=["keep", "rank"]).policies) == ["keep", "rank"]


def test_policies_are_ordered_as_they_should_be():
    found = estimate_memory(small_bert(rank=8), batch_size=16, seq_len=64).policies
    assert found["rank+fp8"].activations < 0.6 * found["rank"].activations < 0.3 * found["keep"].activations
    assert found["rank"].peak < found["keep"].peak


def test_estimates_are_printed_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    estimate = estimate_memory(small_bert(), batch_size=2, seq_len=16, policies=["keep", "fp8"])
    assert "input_ids 2x16" in str(estimate)
    assert all(f"{estimate.policies[name].peak / 1e6:,.1f} MB" in str(estimate) for name in ("keep", "fp8"))
    assert estimate.plot(tmp_path / "memory.png").stat().st_size > 1000


def test_autocast_makes_activations_smaller():
    model = small_bert()
    exact, half = (
        estimate_memory(model, batch_size=16, seq_len=64, policies=["keep"], autocast=dtype)
        .policies["keep"]
        .activations
        for dtype in (None, torch.bfloat16)
    )
    assert half < 0.9 * exact


@pytest.mark.parametrize("compressed", [False, True], ids=["dense", "compressed"])
def test_a_model_on_the_meta_device_is_estimated_as_on_the_cpu(compressed):
    config = BertConfig(**SMALL, vocab_size=2000)
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
        if compressed:
            model = get_comera_model(BertForSequenceClassification, ComeraConfig(rank=8), config=config)
    sizes = {"batch_size": 2, "seq_len": 16, "policies": ["rank"]}
    live = small_bert(rank=8) if compressed else small_bert()
    assert estimate_memory(model, **sizes) == estimate_memory(live, **sizes)


def test_models_whose_batch_is_not_known_need_one():
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = CLIPModel(CLIPConfig(text_config=tiny, vision_config=tiny))
    with pytest.raises(ValueError, match=r"CLIPModel.*no labels.*inputs="):
        estimate_memory(model)


BAD = [
    ({"batch_size": 0}, "batch_size=0"),
    ({"seq_len": -4}, "seq_len=-4"),
    ({"seq_len": 4096}, "seq_len=4096 is more than the 512 positions"),
    ({"autocast": "bf16"}, "autocast='bf16' is not a dtype"),
    ({"optimizer": torch.optim.AdamW(nn.Linear(2, 2).parameters())}, "2 of the 2 parameters of the AdamW are not"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        estimate_memory(small_bert(), **settings)


def test_unknown_policies_are_named():
    with pytest.raises(ValueError, match=r"'ranks'.*'rank'"):
        estimate_memory(ARCHITECTURES["gpt2"].new_model(), policies=["ranks"])


def test_an_optimizer_that_reads_entries_is_refused():
    class Reads(torch.optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].sum().item()

    model = ARCHITECTURES["gpt2"].new_model()
    with pytest.raises(ValueError, match="Reads reads entries"):
        estimate_memory(model, seq_len=8, optimizer=Reads(model.parameters(), lr=1))


@pytest.mark.usefixtures("small_chunks")
def test_a_long_batch_is_estimated_as_fast_as_a_short_one():
    model, counts = small_bert(rank=8).train(), []
    for seq_len in (16, 512):
        with CountOperations() as count:
            estimate_memory(model, batch_size=4, seq_len=seq_len, policies=["keep"])
        counts.append(count.total)
    assert 0 < counts[1] < 1.1 * counts[0]
