"""hf_comera/memory/session.py with hf_comera/modules/wide_hidden.py: a hidden layer that is never written out."""

import pytest
import torch
from hf_comera.modules.wide_hidden import WideHidden
from torch.nn import functional

from hf_comera import ComeraConfig, get_comera_model
from tests.architectures import ARCHITECTURES
from tests.memory.policy_runs import EXACT, Run, assert_same, error, run
from tests.memory.test_session_models import RATES
from tests.modules.conftest import small_chunks, stand_ins, uses  # noqa: F401
from tests.modules.feed_forward_blocks import Block, random_input

BLOCKS = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "gated": {"gated": True, "act": functional.silu, "dropout": 0.3},
    "made real": {"act": functional.selu, "dropout": 0.3},
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("policy", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("settings", BLOCKS.values(), ids=BLOCKS)
def test_blocks(settings, policy):
    block, x = Block(**settings), random_input()
    plain = run(block, {"x": x}, None)
    found = run(block, {"x": x}, policy)
    assert_same(found, plain)
    assert found.saved_bytes <= plain.saved_bytes


@pytest.mark.parametrize("row", ["bert-mlm", "llama-tied"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_models_of_a_size_that_needs_it(row, dropout, uses):  # noqa: F811
    architecture = ARCHITECTURES[row]
    config = architecture.new_config()
    config.update({"hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 1})
    config.update({rate: dropout for rate in RATES if hasattr(config, rate)})
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    ids = torch.randint(2, 241, (16, 80))
    inputs = {"input_ids": ids, "labels": ids}
    plain = run(model, inputs, None)
    assert "code" in uses
    for policy in (*EXACT.values(), "rank", "rank+fp8"):
        found = run(model, inputs, policy)
        assert found.saved_bytes < 0.7 * plain.saved_bytes
        if policy == "rank+fp8":
            assert error(found, plain) < 0.1
        else:
            assert_same(found, plain)


def test_a_stand_in_may_be_all_that_is_saved():
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            ctx.save_for_backward(hidden)
            return hidden * 2

        @staticmethod
        def backward(ctx, gradient):
            (hidden,) = ctx.saved_tensors
            return gradient * (hidden * 0 + 2)

    assert issubclass(WideHidden, torch.Tensor)
    block, x = Block(Saves.apply), random_input()
    plain = run(block, {"x": x}, None)
    for policy in EXACT.values():
        found: Run = run(block, {"x": x}, policy)
        assert_same(found, plain)
