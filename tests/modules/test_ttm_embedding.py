"""hf_comera/modules/ttm_embedding.py: computes what nn.Embedding with the same table computes."""

import pytest
import torch
from torch.export import Dim
from torch.nn.functional import embedding

from hf_comera.modules import TTMEmbedding


@pytest.mark.parametrize(
    ("num_embeddings", "embedding_dim", "order"), [(241, 48, 4), (57, 11, 3), (30522, 12, 2), (50257, 8, 4), (5, 7, 1)]
)
def test_equals_nn_embedding_with_its_dense_table(num_embeddings, embedding_dim, order):
    factors = (1,) * (order - 1) + (embedding_dim,)
    layer = TTMEmbedding(num_embeddings, embedding_dim, out_factors=factors, ranks=3, dtype=torch.float64)
    ids = torch.randint(0, num_embeddings, (2, 5))
    torch.testing.assert_close(layer(ids), embedding(ids, layer.dense()))
    assert layer.dense().shape == (num_embeddings, embedding_dim)
    x = torch.randn(2, embedding_dim, dtype=torch.float64)
    torch.testing.assert_close(layer(x, project=True), x @ layer.dense().T)


def exported(layer, x, strict=False, **settings):
    """The program that ``torch.export`` makes of a call, for inputs of other sizes, and names of its operators."""
    sizes = {"x": {0: Dim.AUTO, 1: Dim.AUTO}, **dict.fromkeys(settings)}
    program = torch.export.export(layer, (x,), settings, dynamic_shapes=sizes, strict=strict).run_decompositions()
    return program.module(), {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("num_embeddings", "embedding_dim", "strict"), [(241, 48, False), (57, 11, True)])
def test_an_exported_layer_is_made_of_operators_of_torch(num_embeddings, embedding_dim, strict, dtype, error):
    layer = TTMEmbedding(num_embeddings, embedding_dim, ranks=3, padding_idx=0, dtype=dtype).eval()
    layer.add_rank_gates()
    uses = [
        (torch.randint(num_embeddings, (3, 7), dtype=torch.int32), {}),
        (
            torch.randn(3, 7, embedding_dim, dtype=dtype),
            {"project": True, "bias": torch.randn(num_embeddings).to(dtype)},
        ),
    ]
    for x, settings in uses:
        program, operators = exported(layer, x[:2, :5].contiguous(), strict, **settings)
        found, expected = program(x, **settings), layer(x, **settings)
        assert not [name for name in operators if "comera" in name]
        assert found.dtype == expected.dtype
        assert (found - expected).norm() <= error * expected.norm()


def test_an_exported_layer_that_trains_keeps_the_gradient_of_its_operator():
    layer = TTMEmbedding(57, 12, ranks=3, padding_idx=4)
    look_up, operators = exported(layer, torch.tensor([[1, 4], [4, 2]]))
    assert "hf_comera.ttm_lookup.default" in operators
    gradients = [
        torch.autograd.grad(call(torch.tensor([[4]])).sum(), [*call.parameters()]) for call in (look_up, layer)
    ]
    torch.testing.assert_close(*gradients)


def test_published_shape_of_bert():
    layer = TTMEmbedding(30522, 768, in_factors=(16, 20, 10, 10), out_factors=(4, 4, 8, 6), ranks=32, device="meta")
    assert sum(core.numel() for core in layer.cores()) == 16 * 4 * 32 + 20 * 4 * 32**2 + 10 * 8 * 32**2 + 10 * 6 * 32


def test_reset_gives_the_asked_deviation():
    layer = TTMEmbedding(241, 48, ranks=8)
    assert layer.dense().std().item() == pytest.approx(1.0, rel=0.05)
    layer.reset_parameters(0.02)
    assert layer.dense().std().item() == pytest.approx(0.02, rel=0.05)


def test_load_dense_at_full_rank_is_exact():
    table = torch.randn(57, 12)
    layer = TTMEmbedding(57, 12, ranks=10_000)
    layer.load_dense(table)
    torch.testing.assert_close(layer(torch.arange(57)), table, rtol=1e-4, atol=1e-5)


def test_inference_checks_ids_and_autocasts_as_training_does():
    table = TTMEmbedding(30, 12, ranks=4)
    x = torch.randn(2, 12)
    with torch.no_grad(), pytest.raises(IndexError, match="index out of range"):
        table(torch.tensor([30]))
    with torch.autocast("cpu", torch.bfloat16):
        trained = table(x, project=True)
        with torch.no_grad():
            kept = table(x, project=True)
    assert kept.dtype == trained.dtype == torch.bfloat16
    assert torch.equal(kept, trained)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TTMEmbedding(241, 48, in_factors=(3, 3)), r"in_factors=\(3, 3\) multiply to 9.*size 241"),
        (lambda: TTMEmbedding(241, 48, in_factors=(16, 16), out_factors=(4, 4, 3)), "differ in number"),
        (lambda: TTMEmbedding(241, 48, ranks=-1), "rank=-1"),
        (lambda: TTMEmbedding(241, 48).load_dense(torch.randn(48, 241)), "weight has shape"),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
