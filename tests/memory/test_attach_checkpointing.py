"""hf_comera/memory/attach.py: gradient checkpointing inside of a model with a policy, and around it."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_comera.memory import set_activation_policy
from tests.architectures import ARCHITECTURES
from tests.memory.policy_runs import EXACT, RANK, assert_same, run
from tests.memory.test_session_models import model_of

ROWS = ["bert-mlm", "gpt2", "llama-tied", "t5"]
is_reentrant = pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])


@is_reentrant
@pytest.mark.parametrize("row", ROWS)
def test_inside(row, reentrant):
    architecture = ARCHITECTURES[row]
    model, inputs = model_of(architecture, True, 0.1), architecture.training_inputs()
    model.config.use_cache = False
    not_checkpointed = run(model, inputs, None)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    plain = run(model, inputs, None)
    assert plain.saved_bytes < not_checkpointed.saved_bytes
    for policy in EXACT.values():
        found = run(model, inputs, policy)
        assert_same(found, plain)
        assert found.saved_bytes < plain.saved_bytes


@is_reentrant
def test_around(reentrant):
    """Without reentrance checkpointing decides, which is said once; with it, the policy holds while it recomputes."""
    architecture = ARCHITECTURES["bert-mlm"]
    model, inputs = model_of(architecture, False, 0.1), architecture.training_inputs()

    def gradients():
        model.zero_grad()
        torch.manual_seed(3)
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        call = lambda embedded: model(inputs_embeds=embedded, labels=inputs["labels"]).loss  # noqa: E731
        checkpoint(call, embedded, use_reentrant=reentrant).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    set_activation_policy(model, RANK)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [gradients(), gradients()]
    assert len(caught) == (0 if reentrant else 1)
    assert all("Use one of the two" in str(warning.message) for warning in caught)
    for again in found:
        assert all(left is right or torch.equal(left, right) for left, right in zip(again, expected, strict=True))
