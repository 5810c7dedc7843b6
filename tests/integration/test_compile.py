"""``torch.compile(fullgraph=True)`` takes every supported model as it is, and a rank cut costs one recompile."""

import pytest
import torch
from torch._dynamo.utils import counters

from hf_comera.compress.selection import DEFAULT_TARGETS
from hf_comera.modules import TTLinear
from tests.integration.model_types import model_and_batch

SLOW = ("whisper", "mt5")  # long to trace; bart and t5, which are much like them, always run


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


def loss_and_gradients(model, batch):
    """Of the first output, which is a loss if the batch has labels; with the same dropout each time."""
    torch.manual_seed(1)
    output = model(**batch)[0].flatten()
    loss = output @ torch.linspace(-1, 1, len(output), dtype=output.dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return loss.detach(), torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)


def cut_ranks(model):
    """Fewer ranks in one layer."""
    layer = next(module for module in model.modules() if isinstance(module, TTLinear))
    settings = {"in_factors": layer.in_factors, "out_factors": layer.out_factors, "ranks": 3}
    other = TTLinear(layer.in_features, layer.out_features, **settings)
    layer.load_cores([core.detach() for core in other.cores()])


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in DEFAULT_TARGETS]
)
def test_one_graph_to_train_and_one_more_after_a_cut_and_to_evaluate(model_type):
    model, batch = model_and_batch(model_type)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for num_graphs, change in enumerate((torch.nn.Module.train, cut_ranks, torch.nn.Module.eval), start=1):
        change(model)
        for _ in range(2):
            found, expected = (loss_and_gradients(function, batch) for function in (compiled, model))
            torch.testing.assert_close(found, expected)
        assert graphs() == num_graphs
