"""``GraphedStep`` under activation policies: graphs make again in backward what the plain loop makes again."""

from dataclasses import replace

import pytest

from hf_comera import set_activation_policy
from hf_comera.memory.policy import NAMED_POLICIES
from tests.memory.policy_runs import draw_as_a_gpu
from tests.training.graphed_runs import STEPS, Run, assert_same, batches_of
from tests.training.tape_capture import use_tape

POLICIES = {name: replace(policy, min_bytes=0) for name, policy in NAMED_POLICIES.items() if name != "keep"}


@pytest.fixture(autouse=True)
def _draws(monkeypatch):
    """As on a GPU, and what is ours in bits whatever the size."""
    draw_as_a_gpu(monkeypatch)
    monkeypatch.setattr("hf_comera.ops.bit_dropout.MIN_NUMEL", 1)


def run(name, policy, **settings):
    made = Run(name, **settings)
    if name == "t5":
        made.model.set_attn_implementation("eager")  # fused attention of a CPU draws in torch's own way
    set_activation_policy(made.model, policy)
    return made


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ["bert-mlm", "gpt2", "llama-tied", "t5"])
def test_every_number_is_that_of_the_plain_loop(monkeypatch, name, policy):
    use_tape(monkeypatch)
    batches = batches_of(name)
    plain = run(name, policy).plainly(batches)
    graphed = run(name, policy).by_graph(batches)
    assert (graphed.step.num_captures, graphed.step.num_replays) == (1, STEPS - 3), graphed.step.reason
    assert_same(plain, graphed)


def test_ranks_are_cut_under_a_policy(monkeypatch):
    use_tape(monkeypatch)
    batches = batches_of(count=20)
    plain = run("bert-mlm", POLICIES["rank"], part=0.4, total_steps=20).plainly(batches)
    graphed = run("bert-mlm", POLICIES["rank"], part=0.4, total_steps=20).by_graph(batches)
    assert graphed.step.num_captures >= 2
    assert_same(plain, graphed)
