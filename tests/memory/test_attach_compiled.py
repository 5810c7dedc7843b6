"""hf_comera/memory/attach.py: compiled models run as without a policy, and say so; compiled parts fit in."""

import warnings

import pytest
import torch
from torch import nn

from hf_comera.memory import set_activation_policy
from tests.memory.policy_runs import RANK, Of, assert_same, run, scalar_of, stacks
from tests.memory.test_attach import sessions  # noqa: F401
from tests.memory.test_sources import deep, three_users

every_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def gradients_of(model, module, x):
    module.zero_grad()
    scalar_of(model(x)).backward()
    assert stacks() == (0, None)
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@every_backend
@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "module.compile"])
def test_a_compiled_model_says_once_that_the_compiler_decides(backend, in_place, sessions):  # noqa: F811
    module, x = Of(three_users), torch.randn(4, 6, 8)
    plain = run(module, {"x": x}, None)
    set_activation_policy(module, RANK)
    model = module
    if in_place:
        module.compile(backend=backend, fullgraph=True)
    else:
        model = torch.compile(module, backend=backend, fullgraph=True)
    with pytest.warns(UserWarning, match="no effect in compiled code: the compiler decides") as caught:
        found = gradients_of(model, module, x)
    assert len(caught) == 1
    torch.testing.assert_close(found["first.weight"], plain.gradients["first.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients_of(model, module, x)
    assert sessions == []


@every_backend
def test_a_graph_break(backend):
    def broken(module, x):
        y = three_users(module, x)
        torch._dynamo.graph_break()
        return deep(module, y)

    module, x = Of(broken), torch.randn(4, 6, 8)
    plain = run(module, {"x": x}, None)
    set_activation_policy(module, RANK)
    with pytest.warns(UserWarning, match="no effect in compiled code"):
        found = gradients_of(torch.compile(module, backend=backend), module, x)
    torch.testing.assert_close(found["first.weight"], plain.gradients["first.weight"])


@every_backend
def test_a_compiled_part_of_a_model_with_a_policy(backend):
    model, x = nn.Sequential(Of(three_users), Of(deep)), torch.randn(4, 6, 8)
    plain = run(model, {"input": x}, None)
    model[0].compile(backend=backend, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        found = run(model, {"input": x}, RANK)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert found.saved_bytes < plain.saved_bytes
    if backend == "eager":
        assert_same(found, plain)
