"""hf_comera/modules/fast_dropout.py: dropout of compressed models, fast where it serves and torch's elsewhere."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_comera import ComeraConfig, get_comera_model, merge_and_unload
from hf_comera.modules.fast_dropout import FastDropout, disable_fast_dropout, enable_fast_dropout
from hf_comera.ops import bit_dropout
from tests.architectures import ARCHITECTURES


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bit_dropout, "MIN_NUMEL", 1)


def dropouts(model):
    return {type(module) for module in model.modules() if isinstance(module, nn.Dropout)}


def test_a_compressed_model_has_it_until_merged(tmp_path):
    architecture = ARCHITECTURES["bert-mlm"]
    model = get_comera_model(architecture.auto_class, ComeraConfig(rank=4), config=architecture.new_config())
    assert dropouts(model) == {FastDropout}
    assert dropouts(copy.deepcopy(model)) == dropouts(pickle.loads(pickle.dumps(model))) == {FastDropout}
    model.save_pretrained(tmp_path)
    assert dropouts(architecture.auto_class.from_pretrained(tmp_path)) == {FastDropout}
    assert dropouts(merge_and_unload(model)) == {nn.Dropout}


def test_only_plain_dropout_is_replaced():
    class Own(nn.Dropout):
        pass

    model = nn.Sequential(nn.Dropout(0.1), Own(0.1), nn.Dropout1d(0.1))
    enable_fast_dropout(model)
    assert [type(module) for module in model] == [FastDropout, Own, nn.Dropout1d]
    disable_fast_dropout(model)
    assert [type(module) for module in model] == [nn.Dropout, Own, nn.Dropout1d]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: FastDropout(0.5).eval()(x),
        lambda x: FastDropout(0.0)(x),
    ],
)
def test_nothing_is_dropped(call):
    x = torch.randn(5, 7)
    assert torch.equal(call(x), x)


@pytest.mark.parametrize(
    ("settings", "x"),
    [
        ({"p": 1.0}, torch.randn(5, 7)),
        ({"p": 0.3, "inplace": True}, torch.randn(5, 7)),
    ],
)
def test_elsewhere_it_is_torch(settings, x):
    torch.manual_seed(0)
    expected = nn.Dropout(**settings)(x.clone())
    torch.manual_seed(0)
    assert torch.equal(FastDropout(**settings)(x.clone()), expected)


def test_a_rate_in_a_tensor_and_another_default_device():
    x, module = torch.ones(1000, 3), FastDropout(0.5)
    module.p = torch.tensor(0.5)
    with torch.device("meta"):
        y = module(x)
    assert set(y.unique().tolist()) == {0.0, 2.0}


def test_integers_are_refused_as_torch_does():
    x = torch.ones(5, 7, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="Float"):
        nn.Dropout(0.5)(x)
    with pytest.raises(RuntimeError, match="Float"):
        FastDropout(0.5)(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_draws_the_same(dynamic):
    module, found = FastDropout(0.3), []
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
        x = torch.linspace(1, 2, 35).view(5, 7).requires_grad_()
        torch.manual_seed(0)
        y = call(x)
        y.square().sum().backward()
        found.append((y, x.grad))
    torch.testing.assert_close(*found)


def test_exported_it_is_torch():
    program = torch.export.export(FastDropout(0.3), (torch.randn(5, 7),))
    assert not any("hf_comera" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drops_and_scales(dtype):
    x = torch.ones(1000, 33, dtype=dtype)
    y = FastDropout(0.25)(x)
    assert y.dtype == dtype
    assert abs((y == 0).float().mean() - 0.25) < 0.01
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75, dtype=dtype).item()}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed(use_reentrant):
    module, found = FastDropout(0.5), []
    for call in (module, lambda x: checkpoint(module, x, use_reentrant=use_reentrant)):
        x = torch.linspace(1, 2, 35).view(5, 7).requires_grad_()
        torch.manual_seed(0)
        y = call(x)
        y.square().sum().backward()
        found.append((y, x.grad))
    torch.testing.assert_close(*found)
