"""hf_comera/memory/attach.py: a policy comes, goes, nests and travels with its model, and leaves nothing behind."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from hf_comera.memory import ActivationPolicy, activation_policy, set_activation_policy
from hf_comera.memory import attach as attach_file
from hf_comera.memory.policy import NAMED_POLICIES
from hf_comera.memory.session import Session
from tests.architectures import ARCHITECTURES
from tests.memory.policy_runs import RANK, Of, assert_same, run, scalar_of, stacks
from tests.memory.test_sources import deep, three_users

GPT2 = ARCHITECTURES["gpt2"]


@pytest.fixture
def sessions(monkeypatch):
    """The policies of all sessions, in the order in which they begin."""
    seen = []
    enter = Session.__enter__
    monkeypatch.setattr(Session, "__enter__", lambda session: seen.append(session.policy) or enter(session))
    return seen


def num_hooks(module):
    names = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs")
    return sum(len(getattr(module, name)) for name in (*names, "_forward_hooks_always_called"))


def test_a_policy_is_set_replaced_and_taken_off():
    module = Of(deep)
    module.register_forward_hook(lambda module, args, output: output)
    before = num_hooks(module)
    for policy in ("rank", "fp8", RANK, "keep", "rank+fp8") * 3:
        set_activation_policy(module, policy)
        assert activation_policy(module) == NAMED_POLICIES.get(policy, RANK)
        assert num_hooks(module) == before + 3
    set_activation_policy(module, None)
    set_activation_policy(module, None)
    assert activation_policy(module) is None
    assert num_hooks(module) == before


def test_an_unknown_policy_changes_nothing():
    module = Of(deep)
    set_activation_policy(module, "rank")
    with pytest.raises(ValueError, match="'fast' is unknown"):
        set_activation_policy(module, "fast")
    assert activation_policy(module) == NAMED_POLICIES["rank"]


def through_bytes(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.deepcopy, through_bytes], ids=["deepcopy", "pickle"])
def test_copies_have_the_policy_and_may_lose_it(copied, sessions):
    module, x = Of(three_users), torch.randn(4, 6, 8)
    plain = run(module, {"x": x}, None)
    set_activation_policy(module, RANK)
    again = copied(module)
    assert activation_policy(again) == RANK
    assert_same(run(again, {"x": x}, RANK), plain)
    set_activation_policy(again, None)
    sessions.clear()
    again(x)
    assert sessions == []
    module(x)
    assert sessions == [RANK]


UNRECORDED = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("context", UNRECORDED.values(), ids=UNRECORDED)
def test_nothing_happens_without_gradients(context, sessions):
    model, inputs = GPT2.new_model(), GPT2.training_inputs()
    with context():
        expected = model(**inputs).logits
        generated = model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False)
        set_activation_policy(model, RANK)
        assert torch.equal(model(**inputs).logits, expected)
        assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False), generated)
    assert torch.equal(model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False), generated)
    assert sessions == []
    assert torch.equal(model(**inputs).logits, expected)
    assert sessions == [RANK]


def test_the_policy_of_a_part_holds_for_the_part(sessions):
    outer = nn.Sequential(Of(three_users), Of(three_users), Of(three_users))
    x = torch.randn(4, 6, 8)
    plain = run(outer, {"input": x}, None)
    all_rebuilt = run(outer, {"input": x}, RANK)
    shallow = ActivationPolicy(min_bytes=0, depth=1)
    bytes_of = {}
    for policy in ("keep", shallow):
        set_activation_policy(outer[1], policy)
        sessions.clear()
        mixed = run(outer, {"input": x}, RANK)
        assert sessions == [RANK, activation_policy(outer[1])]
        assert_same(mixed, plain)
        bytes_of[policy] = mixed.saved_bytes
        sessions.clear()
        assert_same(run(outer, {"input": x}, None), plain)
        assert sessions == ([] if policy == "keep" else [shallow])
    assert all_rebuilt.saved_bytes < bytes_of["keep"] < plain.saved_bytes


class Raises(nn.Module):
    error: BaseException | None = ValueError("planted")

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("planted"), KeyboardInterrupt(), SystemExit()], ids=repr)
def test_a_forward_that_raised_leaves_nothing_behind(error):
    inner, raises, x = nn.Sequential(Of(deep), Raises()), Raises(), torch.randn(4, 6, 8)
    inner[1].error = raises.error = None
    outer = nn.Sequential(inner, raises)
    plain = run(outer, {"input": x}, None)
    set_activation_policy(inner, RANK)
    for failing in (raises, inner[1]):
        failing.error = error
        set_activation_policy(outer, RANK)
        for _ in range(3):
            with pytest.raises(type(error)):
                outer(x)
        assert stacks() == (0, None) or not isinstance(error, Exception)
        failing.error = None
        outer(x)
        assert_same(run(outer, {"input": x}, RANK), plain)  # also looks at the stacks
    assert attach_file._entered() == []


def test_what_was_interrupted_is_left_alone_below_the_modes_of_others():
    module, other = nn.Sequential(Of(deep), Raises()), Of(deep)
    set_activation_policy(module, RANK)
    set_activation_policy(other, RANK)
    module[1].error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        module(torch.randn(4, 6, 8))
    with torch.device("cpu"):
        other(torch.randn(4, 6, 8))
        assert stacks()[0] == 2
    other(torch.randn(4, 6, 8))
    assert stacks() == (0, None)


def test_hooks_of_users_may_change_outputs():
    module, x = Of(three_users), torch.randn(4, 6, 8)
    module.register_forward_pre_hook(lambda _, args, given: (args, {"x": given["x"] * 2}), with_kwargs=True)
    module.first.register_forward_hook(lambda module, args, output: output.exp())
    module.register_forward_hook(lambda module, args, output: output.square() * output)
    plain = run(module, {"x": x}, None)
    assert_same(run(module, {"x": x}, RANK), plain)
    module.register_forward_hook(lambda module, args, output: output.tanh() * output)
    again = run(module, {"x": x}, RANK)
    assert_same(again, run(module, {"x": x}, None))


def test_other_saved_tensor_hooks_decide_which_is_said_once(sessions):
    module, x = Of(three_users), torch.randn(4, 6, 8)
    plain = run(module, {"x": x}, None)
    set_activation_policy(module, RANK)
    module.zero_grad()
    with torch.autograd.graph.save_on_cpu(), pytest.warns(UserWarning, match="no effect inside of other saved-t"):
        loss = scalar_of(module(x))
    loss.backward()
    assert sessions == []
    assert torch.equal(module.first.weight.grad, plain.gradients["first.weight"])
    with torch.autograd.graph.save_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x)


def test_transforms_of_functions_decide_which_is_said_once():
    module, x = Of(three_users), torch.randn(4, 6, 8)
    plain = run(module, {"x": x}, None)
    set_activation_policy(module, RANK)
    parameters = dict(module.named_parameters())
    gradient = grad(lambda parameters: scalar_of(functional_call(module, parameters, (x,))))
    with pytest.warns(UserWarning, match=r"no effect where .* not allowed, such as under a transform of torch.func"):
        found = gradient(parameters)
    torch.testing.assert_close(found["first.weight"], plain.gradients["first.weight"])
    gradient(parameters)
    assert stacks() == (0, None)


def test_models_take_turns():
    """A teacher inside of a student's step; and forwards of two models before their backwards, in any order."""
    student, teacher, x = Of(three_users), Of(deep), torch.randn(4, 6, 8)
    expected = [run(model, {"x": x}, None) for model in (student, teacher)]
    student.zero_grad()
    teacher.zero_grad()
    for model in (student, teacher):
        set_activation_policy(model, RANK)
    losses = [scalar_of(model(x)) for model in (student, teacher)]
    with torch.no_grad():
        teacher(x)
    losses[0].backward()
    losses[1].backward()
    for model, plain in zip((student, teacher), expected, strict=True):
        assert torch.equal(model.first.weight.grad, plain.gradients["first.weight"])
