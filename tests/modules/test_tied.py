"""hf_comera/modules/tied.py: shared cores appear once, and the link survives copies, pickles and state dicts."""

import copy
import pickle

import pytest
import torch
from torch import nn

from hf_comera.modules import TiedEmbedding, TiedHead, TTMEmbedding


@pytest.fixture
def model():
    embedding = TTMEmbedding(57, 12, ranks=3, padding_idx=1)
    head = TiedHead(embedding, nn.Parameter(torch.randn(57)))
    return nn.ModuleDict({"embedding": embedding, "head": head, "second": TiedEmbedding(embedding)})


def test_values(model):
    ids = torch.arange(10)
    x = torch.randn(3, 12)
    torch.testing.assert_close(model["head"](x), x @ model["embedding"].dense().T + model["head"].bias)
    assert torch.equal(model["second"](ids), model["embedding"](ids))
    assert model["head"].weight.shape == (57, 12)
    assert (model["second"].num_embeddings, model["second"].embedding_dim, model["second"].padding_idx) == (57, 12, 1)


def test_cores_appear_once(model):
    assert list(model.state_dict()) == [*(f"embedding.core_{k}" for k in range(4)), "head.bias"]
    assert len(list(model.parameters())) == 5


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_link(model, duplicate):
    twin = duplicate(model)
    assert twin["head"].source is twin["embedding"]
    assert twin["second"].source is twin["embedding"]
    assert twin["embedding"] is not model["embedding"]


def test_reset_zeroes_the_bias_and_leaves_the_cores(model):
    before = model["embedding"].dense()
    model["head"].reset_parameters()
    assert not model["head"].bias.any()
    assert torch.equal(before, model["embedding"].dense())


def test_both_uses_add_up_in_the_gradient(model):
    ids = torch.tensor([2, 3])
    model["head"](model["embedding"](ids)).sum().backward()
    table = model["embedding"].dense()
    reference = torch.autograd.grad((table[ids] @ table.T).sum(), model["embedding"].cores())
    for core, expected in zip(model["embedding"].cores(), reference, strict=True):
        torch.testing.assert_close(core.grad, expected)


@pytest.mark.parametrize("shape", [(4,), (2, 5), (30, 30)])
def test_outputs_can_be_changed_in_place(model, shape):
    """As BLIP does with embeddings, and others with logits."""
    ids = torch.randint(57, shape)
    for output in (model["embedding"](ids), model["head"](torch.randn(*shape, 12))):
        output += 1
        output *= 2
        output.sum().backward()
    assert all(core.grad is not None for core in model["embedding"].cores())
