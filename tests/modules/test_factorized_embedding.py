"""hf_comera/modules/factorized_embedding.py: computes what nn.Embedding and a tied head with the product compute."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.func import functional_call
from torch.nn.functional import embedding, linear

from hf_comera.modules import FactorizedEmbedding, TiedHead, TTMEmbedding

FORMS = {"plain": {}, "train": {"ranks": 3, "in_factors": (5, 7, 7), "out_factors": (2, 3, 2)}}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SIZES = [(241, 48, 11), (57, 13, 7), (1031, 9, 1), (20, 90, 5)]


def new_layer(num_embeddings=241, embedding_dim=48, width=11, form=None, **settings):
    settings = {"dtype": torch.float64, **(form or {}), **settings}
    if form and (num_embeddings, width) != (241, 11):
        settings |= {"in_factors": None, "out_factors": None}
    return FactorizedEmbedding(num_embeddings, embedding_dim, width, **settings)


@forms
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("shape", [(4,), (2, 5), (0,)])
def test_values_and_gradients_are_those_of_the_dense_table(sizes, shape, form):
    layer = new_layer(*sizes, form=form)
    num_embeddings, embedding_dim, _ = sizes
    ids, x = torch.randint(num_embeddings, shape), torch.randn(*shape, embedding_dim, dtype=torch.float64)
    bias = torch.randn(num_embeddings, dtype=torch.float64)
    table = layer.dense()
    assert table.shape == (num_embeddings, embedding_dim)
    for found, expected in (
        (layer(ids), embedding(ids, table)),
        (layer(x, project=True), x @ table.T),
        (layer(x, project=True, bias=bias), linear(x, table, bias)),
    ):
        torch.testing.assert_close(found, expected)
        weights = torch.randn_like(found)
        gradients = [
            torch.autograd.grad((y * weights).sum(), layer.cores(), retain_graph=True) for y in (found, expected)
        ]
        torch.testing.assert_close(*gradients)


@forms
def test_parameters_are_flat_and_named_for_what_they_are(form):
    layer = new_layer(form=form)
    table = ["table"] if not form else [f"table.core_{k}" for k in range(3)]
    assert sorted(layer.state_dict()) == sorted([*table, "projection"])
    assert [id(core) for core in layer.cores()] == [id(layer.get_parameter(name)) for name in (*table, "projection")]
    assert layer.num_core_parameters == sum(parameter.numel() for parameter in layer.parameters())
    assert layer.num_dense_parameters == 241 * 48
    assert layer.ranks == ((3, 3) if form else ())


def test_the_row_of_padding_starts_at_zero_and_lookups_give_it_no_gradient():
    layer = new_layer(padding_idx=4)
    assert not layer.dense()[4].any()
    layer(torch.tensor([[4, 2], [4, 4]])).sum().backward()
    assert not layer.table.grad[4].any()
    assert layer.table.grad[2].any()
    torch.nn.init.normal_(layer.weight, std=0.5)
    assert not layer.dense()[4].any()


@forms
@pytest.mark.parametrize(("width", "std"), [(1, 0.02), (11, 0.5), (30, 1.0)])
def test_entries_of_the_implied_table_have_the_asked_deviation(width, std, form):
    layer = new_layer(width=width, form=form)
    layer.reset_parameters(std)
    assert layer.dense().square().mean().sqrt().item() == pytest.approx(std, rel=1e-5)
    assert layer.narrow_table().square().mean().sqrt().item() == pytest.approx(std, rel=0.1)


def test_the_default_deviation_is_that_of_torch():
    assert new_layer(1000, 64, 16, dtype=torch.float32).dense().std().item() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_table_of_that_rank_is_taken_over_exactly(sizes, dtype):
    num_embeddings, embedding_dim, width = sizes
    table = torch.randn(num_embeddings, width) @ torch.randn(width, embedding_dim)
    table[3] = 0
    layer = FactorizedEmbedding(*sizes, dtype=dtype)
    layer.load_dense(table.to(dtype))
    error = (layer.dense().double() - table.to(dtype)).norm() / table.norm()
    assert error < {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert not layer.dense()[3].any()
    assert layer.table.dtype == layer.projection.dtype == dtype
    drawn = FactorizedEmbedding(*sizes).projection.square().mean()
    torch.testing.assert_close(layer.projection.float().square().mean(), drawn, rtol=1.0, atol=0)


def test_a_narrow_table_that_is_a_train_takes_over_what_its_ranks_can():
    table = torch.randn(241, 11, dtype=torch.float64) @ torch.randn(11, 48, dtype=torch.float64)
    layer = new_layer(form={"ranks": 10_000})
    layer.load_dense(table)
    torch.testing.assert_close(layer.dense(), table)


def weighted_error(layer, table, counts):
    return (counts[:, None] * (layer.dense() - table).square()).sum()


def test_counts_of_tokens_decide_which_rows_are_kept_best():
    table = torch.randn(241, 48, dtype=torch.float64)
    counts = torch.randint(0, 3, (241,)) ** torch.randint(0, 8, (241,))
    plain, weighted = new_layer(), new_layer()
    plain.load_dense(table)
    weighted.load_dense(table, counts)
    # Eckart and Young: what is left of the matrix with weighted rows
    left = torch.linalg.svdvals(counts.sqrt()[:, None] * table)[11:].square().sum()
    torch.testing.assert_close(weighted_error(weighted, table, counts), left)
    assert weighted_error(weighted, table, counts) < weighted_error(plain, table, counts)
    ones = torch.ones(241)
    assert weighted_error(plain, table, ones) < weighted_error(weighted, table, ones)
    # rows that are never counted are still the nearest that this projection can make
    basis = torch.linalg.qr(weighted.projection.detach().T).Q
    torch.testing.assert_close(weighted.dense().detach(), table @ basis @ basis.T)


BAD = {
    "no width": (lambda: new_layer(width=0), r"width=0 is needed from 1 to 40.*241 x 48.*example 12"),
    "a wide one": (lambda: new_layer(width=41), "width=41 is needed from 1 to 40"),
    "few rows": (lambda: new_layer(2, 768, 8), "width=8 is needed from 1 to 1.*example 1"),
    "shape": (lambda: new_layer().load_dense(torch.randn(48, 241)), r"weight has shape \(48, 241\)"),
    "counts of others": (
        lambda: new_layer().load_dense(torch.randn(241, 48), torch.ones(240)),
        r"token_counts has shape \(240,\), but is needed.*\(241,\).*torch.bincount\(ids, minlength=241\)",
    ),
    "a list": (lambda: new_layer().load_dense(torch.randn(241, 48), [1] * 241), "token_counts has type list"),
    "negative": (
        lambda: new_layer().load_dense(torch.randn(241, 48), torch.arange(241) - 2),
        "token_counts has entries from -2 to 238, but finite counts of at least 0",
    ),
    "all zero": (lambda: new_layer().load_dense(torch.randn(241, 48), torch.zeros(241)), "not all of them 0"),
    "nan": (lambda: new_layer().load_dense(torch.randn(241, 48), torch.full((241,), torch.nan)), "finite counts"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("ids", [[241], [-1]])
def test_ids_beyond_the_table_raise_as_in_torch(ids):
    with pytest.raises(IndexError):
        new_layer()(torch.tensor(ids))


@forms
def test_the_lazy_weight_answers_and_computes(form):
    layer = new_layer(form=form)
    assert (layer.weight.shape, layer.weight.dtype) == ((241, 48), torch.float64)
    x = torch.randn(3, 48, dtype=torch.float64)
    torch.testing.assert_close(linear(x, layer.weight), x @ layer.dense().T)
    linear(x, layer.weight).sum().backward()
    assert all(core.grad is not None for core in layer.cores())
    before = layer.dense()
    with torch.no_grad():
        layer.weight.mul_(0.5)
    torch.testing.assert_close(layer.dense(), before / 2)
    with pytest.raises(RuntimeError, match=r"FactorizedEmbedding keeps it as cores.*projection"):
        layer.weight.requires_grad_(False)


def test_under_autocast_rows_keep_their_dtype_and_logits_have_that_of_autocast():
    layer = new_layer(dtype=torch.float32)
    ids, x = torch.randint(241, (3, 4)), torch.randn(3, 4, 48)
    with torch.autocast("cpu", torch.bfloat16):
        rows, logits = layer(ids), layer(x, project=True)
    assert torch.equal(rows, layer(ids))
    assert logits.dtype == torch.bfloat16


def test_a_tied_head_goes_through_the_narrow_table():
    layer = new_layer()
    head = TiedHead(layer, nn.Parameter(torch.randn(241, dtype=torch.float64)))
    twin = copy.deepcopy(nn.ModuleDict({"words": layer, "head": head}))
    assert twin["head"].source is twin["words"]
    x = torch.randn(2, 3, 48, dtype=torch.float64)
    torch.testing.assert_close(head(x), linear(x, layer.dense(), head.bias))
    assert (head.in_features, head.out_features, head.weight.shape) == (48, 241, (241, 48))


@forms
def test_gates_of_a_train_are_those_of_the_layer(form):
    layer = new_layer(form=form)
    layer.add_rank_gates()
    assert len(layer.rank_gates()) == (2 if form else 0)
    assert isinstance(layer.table, TTMEmbedding) == bool(form)


def test_it_compiles_exports_and_is_called_with_other_parameters():
    layer = new_layer(dtype=torch.float32).eval()
    ids, x = torch.randint(241, (3, 4)), torch.randn(3, 4, 48)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids), layer(ids))
    for inputs, settings in ((ids, {}), (x, {"project": True})):
        sizes = {"x": {0: Dim.AUTO, 1: Dim.AUTO}, **dict.fromkeys(settings)}
        program = torch.export.export(layer, (inputs,), settings, dynamic_shapes=sizes)
        torch.testing.assert_close(program.module()(inputs[:2], **settings), layer(inputs[:2], **settings))
    doubled = {name: 2 * parameter for name, parameter in layer.named_parameters()}
    torch.testing.assert_close(functional_call(layer, doubled, ids), 4 * layer(ids))
