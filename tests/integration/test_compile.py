"""``torch.compile(fullgraph=True)`` takes every supported model as it is, and a rank cut costs one recompile."""

import pytest
import torch
from torch._dynamo.utils import counters

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules import TTLinear
from tests.architectures import ARCHITECTURES


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def cut_ranks(model):
    """Fewer ranks in one layer."""
    layer = next(module for module in model.modules() if isinstance(module, TTLinear))
    settings = {"in_factors": layer.in_factors, "out_factors": layer.out_factors, "ranks": 3}
    other = TTLinear(layer.in_features, layer.out_features, **settings)
    layer.load_cores([core.detach() for core in other.cores()])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_whole_models_compile_as_one_graph_and_once_more_after_a_cut(name):
    architecture = ARCHITECTURES[name]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config()).eval()
    inputs = architecture.inputs()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for expected_graphs in (1, 2):
        for _ in range(2):
            model.zero_grad()
            ours, expected = compiled(**inputs)[0], model(**inputs)[0]
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        settings = {"allow_unused": True, "materialize_grads": True}
        torch.testing.assert_close(
            torch.autograd.grad(ours.square().mean(), trained, **settings),
            torch.autograd.grad(expected.square().mean(), trained, **settings),
            rtol=1e-3,
            atol=1e-6,
        )
        assert graphs() == expected_graphs
        cut_ranks(model)
