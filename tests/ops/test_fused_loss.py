"""hf_comera/ops/fused_loss.py: loss and gradients are those of whole logits, which are never there."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_comera.ops import fused_loss
from hf_comera.ops.fused_loss import IGNORED, head_cross_entropy

WIDTH, VOCABULARY = 6, 37

LABELS = {
    "all": [1, 2, 3, 0, 36, 5, 5, 8, 9, 10, 11, 12],
    "some": [1, IGNORED, 3, IGNORED, IGNORED, 5, 36, 8, IGNORED, 0, 0, IGNORED],
    "one": [IGNORED] * 11 + [7],
    "none": [IGNORED] * 12,
}


def inputs(labels, dtype=torch.float64, bias=True):
    x = torch.randn(3, 4, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    offset = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if bias else None
    return x, weight, offset, torch.tensor(LABELS[labels]).reshape(3, 4)


def whole(x, weight, bias, labels):
    """The same loss of whole logits."""
    logits = nn.functional.linear(x, weight, bias).flatten(0, -2)
    return cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), labels.flatten(), reduction="sum"
    )


@pytest.mark.parametrize("fixed", [False, True], ids=["labelled tokens", "all tokens"])
@pytest.mark.parametrize("tokens_at_once", [1, 5, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("labels", LABELS)
def test_loss_and_gradients_are_those_of_whole_logits(labels, bias, tokens_at_once, fixed, monkeypatch):
    monkeypatch.setattr(fused_loss, "CHUNK_ENTRIES", tokens_at_once * VOCABULARY)
    monkeypatch.setattr(fused_loss, "is_recorded", lambda tensor: fixed)
    arguments = inputs(labels, bias=bias)
    differentiable = [tensor for tensor in arguments[:3] if tensor is not None]
    loss, expected = head_cross_entropy(*arguments), whole(*arguments)
    torch.testing.assert_close(loss, expected)
    # a scale from outside, as a mean, a loss scaler or accumulated batches have it
    found = torch.autograd.grad(loss * 0.3, differentiable)
    for mine, theirs in zip(found, torch.autograd.grad(expected * 0.3, differentiable), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradcheck_and_opcheck():
    x, weight, bias, labels = inputs("some")
    assert torch.autograd.gradcheck(lambda *tensors: head_cross_entropy(*tensors, labels), (x, weight, bias))
    tokens = x.detach().reshape(-1, WIDTH).requires_grad_()
    arguments = (tokens, weight, bias, labels.reshape(-1), IGNORED)
    torch.library.opcheck(fused_loss._head_cross_entropy, arguments, with_settings(True))
    constants = (tokens.detach(), weight.detach(), None, arguments[3], IGNORED)
    torch.library.opcheck(fused_loss._head_cross_entropy, constants, with_settings(False))


def test_another_label_may_say_that_there_is_none():
    x, weight, bias, labels = inputs("some")
    other = labels.masked_fill(labels == IGNORED, 3)
    expected = whole(x, weight, bias, other.masked_fill(other == 3, IGNORED))
    torch.testing.assert_close(head_cross_entropy(x, weight, bias, other, ignore_index=3), expected)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_asks_for_no_gradient_gets_none(frozen):
    *differentiable, labels = inputs("some")
    differentiable[frozen].requires_grad_(False)
    head_cross_entropy(*differentiable, labels).backward()
    assert [tensor.grad is None for tensor in differentiable] == [index == frozen for index in range(3)]


def test_without_gradients_only_the_loss_is_computed():
    arguments = inputs("some")
    with torch.no_grad():
        assert not head_cross_entropy(*arguments).requires_grad
        assert fused_loss._head_cross_entropy(*flat(*arguments), IGNORED, **with_settings(False))[2].numel() == 0


def with_settings(with_gradients):
    return {"with_gradients": with_gradients, "fixed_shapes": False}


def flat(x, weight, bias, labels):
    return x.reshape(-1, WIDTH), weight, bias, labels.reshape(-1)


@pytest.mark.parametrize("autocast", [True, False])
def test_in_16_bits_the_error_is_at_most_twice_that_of_whole_logits(autocast):
    torch.manual_seed(3)
    x, weight, bias, labels = inputs("all", torch.float32 if autocast else torch.bfloat16)
    differentiable = (x, weight, bias)
    exact = [tensor.detach().double().requires_grad_() for tensor in differentiable]
    reference = torch.autograd.grad(whole(*exact, labels), exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = [head_cross_entropy(*differentiable, labels), whole(*differentiable, labels)]
    assert [loss.dtype for loss in losses] == [torch.float32] * 2
    for index, gradients in enumerate(
        zip(*(torch.autograd.grad(loss, differentiable) for loss in losses), strict=True)
    ):
        errors = [(gradient.double() - reference[index]).norm() for gradient in gradients]
        assert gradients[0].dtype == differentiable[index].dtype
        assert errors[0] <= 2 * errors[1] + 1e-3 * reference[index].norm()


class LargestTensor(TorchDispatchMode):
    """Notes the most entries that an operator returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.entries = max(self.entries, *sizes, 0)
        return result


def test_no_tensor_is_larger_than_a_chunk_the_table_or_the_hidden_states(monkeypatch):
    monkeypatch.setattr(fused_loss, "CHUNK_ENTRIES", 4 * VOCABULARY)
    x, weight, bias, labels = torch.randn(200, WIDTH, requires_grad=True), *inputs("all", torch.float32)[1:3], None
    labels = torch.randint(VOCABULARY, (200,))
    with LargestTensor() as seen:
        head_cross_entropy(x, weight, bias, labels).backward()
    assert seen.entries == max(4 * VOCABULARY, VOCABULARY * WIDTH, 200 * WIDTH) < 200 * VOCABULARY


def test_second_derivatives_raise():
    x, weight, bias, labels = inputs("some")
    (gradient,) = torch.autograd.grad(head_cross_entropy(x, weight, bias, labels), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


def test_nothing_is_left_after_backward():
    references = []
    for _ in range(3):
        x, weight, bias, labels = inputs("some")
        loss = head_cross_entropy(x, weight, bias, labels)
        loss.backward()
        references.append(torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage()))
        del x, weight, bias, labels, loss
    assert all(reference.expired() for reference in references)


def test_labels_of_another_shape_raise():
    x, weight, bias, labels = inputs("some")
    with pytest.raises(ValueError, match=r"labels has shape \(12,\), but there are tokens of shape \(3, 4\)"):
        head_cross_entropy(x, weight, bias, labels.flatten())


@pytest.mark.parametrize("wrong", [VOCABULARY, -1, 10**6])
def test_labels_that_are_no_ids_raise(wrong):
    x, weight, bias, labels = inputs("some")
    labels[1, 1] = wrong
    with pytest.raises(IndexError, match=rf"labels holds {wrong}, but the vocabulary has ids from 0 to 36.* -100"):
        head_cross_entropy(x, weight, bias, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_labels_that_are_no_integers_raise(dtype):
    x, weight, bias, labels = inputs("all")
    with pytest.raises(ValueError, match=r"labels has dtype .*labels\.long\(\)"):
        head_cross_entropy(x, weight, bias, labels.to(dtype))


def test_labels_of_other_integers_serve():
    x, weight, bias, labels = inputs("some")
    torch.testing.assert_close(head_cross_entropy(x, weight, bias, labels.int()), whole(x, weight, bias, labels))
