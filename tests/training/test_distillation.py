"""hf_comera/training/distillation.py: losses equal to plain float64 formulas, whatever stands at padding."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_comera.training import distillation
from hf_comera.training.distillation import (
    class_divergence,
    cosine_distance,
    head_divergence,
    hidden_difference,
    mean_of_tokens,
    pool,
    similarity_difference,
    token_divergence,
    top_logits,
)

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]])
"""Padding on the right, on the left, none, on both sides."""


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def states():
    return [drawn(4, 5, 7, seed=i) for i in range(3)], [drawn(4, 5, 7, seed=10 + i) for i in range(3)]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_pooling_is_that_of_each_sentence_alone(pooling):
    hidden = drawn(4, 5, 7)
    rows = [row[mask == 1] for row, mask in zip(hidden, MASK, strict=True)]
    expected = torch.stack([row.mean(0) if pooling == "mean" else row[0] for row in rows])
    torch.testing.assert_close(pool(hidden, MASK, pooling), expected)
    torch.testing.assert_close(pool(hidden, None, pooling), pool(hidden, torch.ones_like(MASK), pooling))


@pytest.mark.parametrize("junk", [0.0, 1e30, float("nan")])
def test_what_stands_at_padding_does_not_matter(junk, states):
    def spoiled(hidden):
        return torch.where(MASK[..., None] == 1, hidden, junk)

    ours, wanted = states
    for pooling in ("mean", "cls"):
        torch.testing.assert_close(pool(spoiled(ours[0]), MASK, pooling), pool(ours[0], MASK, pooling))
    leaves = [hidden.clone().requires_grad_() for hidden in ours]
    values = hidden_difference([spoiled(leaf) for leaf in leaves], [spoiled(hidden) for hidden in wanted], MASK)
    torch.testing.assert_close(values, hidden_difference(ours, wanted, MASK))
    torch.testing.assert_close(mean_of_tokens(spoiled(ours[0])[..., 0], MASK), mean_of_tokens(ours[0][..., 0], MASK))


def test_distances_of_embeddings_equal_their_formulas():
    ours, wanted = drawn(5, 7, seed=1), drawn(5, 7, seed=2)

    def cosine(a, b):
        return (a @ b / (a @ a).sqrt() / (b @ b).sqrt()).item()

    distances = [1 - cosine(a, b) for a, b in zip(ours, wanted, strict=True)]
    torch.testing.assert_close(cosine_distance(ours, wanted), torch.tensor(distances, dtype=torch.float64))
    similarities = [
        sum((cosine(ours[i], ours[j]) - cosine(wanted[i], wanted[j])) ** 2 for j in range(5) if j != i) / 4
        for i in range(5)
    ]
    torch.testing.assert_close(similarity_difference(ours, wanted), torch.tensor(similarities, dtype=torch.float64))
    assert similarity_difference(ours[:1], wanted[:1]).tolist() == [0]


def test_hidden_difference_equals_its_formula(states):
    ours, wanted = states
    expected = [
        sum(
            ((a[b][mask == 1] - c[b][mask == 1]).square().sum(-1) / c[b][mask == 1].square().sum(-1)).mean()
            for a, c in zip(ours, wanted, strict=True)
        )
        / 3
        for b, mask in enumerate(MASK)
    ]
    torch.testing.assert_close(hidden_difference(ours, wanted, MASK), torch.stack(expected))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_class_divergence_equals_its_formula(temperature):
    ours, wanted = drawn(6, 3, seed=1), drawn(6, 3, seed=2)
    p, q = ((logits / temperature).softmax(-1) for logits in (ours, wanted))
    expected = temperature**2 * (q * (q / p).log()).sum(-1)
    torch.testing.assert_close(class_divergence(ours, wanted, temperature), expected)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("top_k", [1, 4, 10, 11, 64])
def test_token_divergence_is_over_the_top_and_the_rest(top_k, temperature):
    ours, wanted = drawn(6, 11, seed=1), 3 * drawn(6, 11, seed=2)
    p, q = ((logits / temperature).softmax(-1) for logits in (ours, wanted))
    order = q.argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    p, q = (torch.cat([x[:, :top_k], x[:, top_k:].sum(-1, keepdim=True)], -1) for x in (p, q))
    terms = torch.where(q > 0, q * (q / p).log(), 0)
    values = token_divergence(ours, top_logits(wanted, top_k, temperature), temperature)
    torch.testing.assert_close(values, temperature**2 * terms.sum(-1))


def test_a_teacher_that_is_sure_leaves_finite_gradients():
    ours, wanted = (100 * drawn(6, 11, seed=1)).requires_grad_(), 1000 * drawn(6, 11, seed=2)
    for top_k in (4, 64):
        (gradient,) = torch.autograd.grad(token_divergence(ours, top_logits(wanted, top_k)).sum(), ours)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("loss", [cosine_distance, similarity_difference, lambda a, b: class_divergence(a, b, 2.0)])
def test_losses_vanish_where_both_agree(loss):
    same = drawn(5, 7)
    assert loss(same, same).abs().max() < 1e-12


class Sizes(TorchDispatchMode):
    """The most entries that an operator returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return result


@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_chunks_of_the_head_change_nothing_and_hold_no_more_logits(chunk, monkeypatch):
    monkeypatch.setattr(distillation, "CHUNK_ENTRIES", chunk * 50)
    torch.manual_seed(0)
    student, teacher = (nn.Linear(width, 50).double() for width in (5, 6))
    hidden, wanted = drawn(17, 5, seed=1).requires_grad_(), drawn(17, 6, seed=2)
    leaves = [hidden, *student.parameters()]
    whole = token_divergence(student(hidden), top_logits(teacher(wanted), 4, 2.0), 2.0)
    with Sizes() as sizes:
        parts = head_divergence(hidden, student, wanted, teacher, 50, top_k=4, temperature=2.0)
        gradients = torch.autograd.grad(parts.sum(), leaves)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(gradients, torch.autograd.grad(whole.sum(), leaves))
    assert sizes.entries <= max(min(chunk, 17) * 50, 50 * 6)


def test_no_chosen_token_is_no_loss():
    head = nn.Linear(5, 50)
    hidden = drawn(0, 5, dtype=torch.float32).requires_grad_()
    values = head_divergence(hidden, head, hidden.detach(), head, 50)
    assert values.shape == (0,)
    values.sum().backward()
    assert head.weight.grad.count_nonzero() == 0


def test_sixteen_bits_are_summed_in_float32():
    ours, wanted = (drawn(5, 9, seed=i).bfloat16() for i in (1, 2))
    for value in (cosine_distance(ours, wanted), token_divergence(ours, top_logits(wanted, 4))):
        assert value.dtype == torch.float32
