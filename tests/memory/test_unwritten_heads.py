"""hf_comera/memory/session.py with hf_comera/modules/unwritten_heads.py: attention over codes that are kept."""

import pytest
import torch
from torch import nn

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules.unwritten_heads import UnwrittenHeads
from tests.architectures import ARCHITECTURES
from tests.memory.policy_runs import EXACT, assert_same, error, run
from tests.modules.attention_blocks import Attention, random_input
from tests.modules.conftest import small_chunks, stand_ins  # noqa: F401

BLOCKS = {
    "plain": {},
    "dropout": {"dropout_p": 0.3},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("is_made_real", [False, True])
def test_blocks(is_made_real, options, policy):
    block, x = Attention(), random_input()
    block.options = options
    block.set_codes(True)
    if is_made_real:
        block.o = nn.Linear(block.o.in_features, 12, dtype=torch.float64)
    plain = run(block, {"x": x}, None)
    found = run(block, {"x": x}, policy)
    assert_same(found, plain)
    assert found.saved_bytes <= plain.saved_bytes


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_model_of_a_size_that_needs_it(dropout, monkeypatch):
    codes, original = [], UnwrittenHeads.code
    monkeypatch.setattr(UnwrittenHeads, "code", lambda self, left: codes.append(1) or original(self, left))
    architecture = ARCHITECTURES["bert-mlm"]
    config = architecture.new_config()
    config.update({"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1})
    config.update({"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout})
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=12), config=config).train()
    ids = torch.randint(2, 241, (64, 64))
    inputs = {"input_ids": ids, "labels": ids}
    plain = run(model, inputs, None)
    assert codes
    for group in {module.joined for module in model.modules() if getattr(module, "joined", None)}:
        group.attention, group.was = None, group.attention
    without = run(model, inputs, None)
    assert plain.saved_bytes < 0.9 * without.saved_bytes
    less = run(model, inputs, "rank")
    for group in {module.joined for module in model.modules() if getattr(module, "joined", None)}:
        group.attention = group.was
    found = run(model, inputs, "rank")
    assert_same(found, plain)
    assert found.saved_bytes < less.saved_bytes < 0.6 * plain.saved_bytes
    assert error(run(model, inputs, "rank+fp8"), plain) < 0.1
