"""hf_comera/memory/call_kinds.py: which calls can be made again, and the arithmetic of masks."""

import pytest
import torch
from torch.nn import functional

from hf_comera.memory.call_kinds import (
    UNRECORDED,
    apply_mask,
    autocasts,
    draws_in_attention,
    dropped_share,
    is_product,
    kind_of,
    weight_among,
)
from hf_comera.ops.kept_bits import drop

X, WIDE, THIN = torch.randn(2, 3, 4), torch.randn(40, 4), torch.randn(8, 4)
KINDS = [  # (function, tensors, other arguments, kind)
    pytest.param(functional.gelu, [X], {}, "functions", id="gelu"),
    pytest.param(torch.mul, [X, X], {}, "functions", id="mul"),
    pytest.param(torch.Tensor.mul, [X, X], {}, "functions", id="mul method"),
    pytest.param(torch.Tensor.__rsub__, [X], {"other": 1}, "functions", id="one minus"),
    pytest.param(drop, [X, torch.zeros(3, dtype=torch.uint8)], {"share": 0.5}, "functions", id="drop"),
    pytest.param(torch.softmax, [X], {"dim": -1}, "functions", id="softmax"),
    pytest.param(torch.Tensor.to, [X], {"dtype": torch.bfloat16}, "functions", id="cast"),
    pytest.param(torch.add, [X, X], {}, "sums", id="residual sum"),
    pytest.param(torch.Tensor.add, [X, X], {}, "sums", id="residual sum with plus"),
    pytest.param(torch.add, [X, X[0, 0]], {}, "functions", id="bias"),
    pytest.param(torch.add, [X], {"other": 1}, "functions", id="sum with a number"),
    pytest.param(functional.layer_norm, [X], {"normalized_shape": (4,)}, "norms", id="layer norm"),
    pytest.param(functional.rms_norm, [X], {"normalized_shape": (4,)}, "norms", id="rms norm"),
    pytest.param(functional.linear, [X, WIDE], {}, "products", id="thin linear"),
    pytest.param(functional.linear, [X, WIDE, WIDE[:, 0]], {}, "products", id="thin linear with bias"),
    pytest.param(functional.linear, [X, THIN], {}, None, id="linear"),
    pytest.param(torch.Tensor.__matmul__, [X, WIDE.t()], {}, "products", id="thin matmul"),
    pytest.param(torch.addmm, [WIDE[:, 0], X[0], WIDE.t()], {}, "products", id="thin addmm"),
    pytest.param(torch.addmm, [THIN[:, 0], X[0], THIN.t()], {}, None, id="addmm"),
    pytest.param(torch.matmul, [X, X.transpose(1, 2)], {}, "scores", id="batched matmul"),
    pytest.param(torch.bmm, [X, X.transpose(1, 2)], {}, "scores", id="bmm"),
    pytest.param(torch.matmul, [X[0, 0], X[0, 0]], {}, None, id="dot product"),
    pytest.param(functional.dropout, [X], {}, "dropout", id="dropout"),
    pytest.param(functional.scaled_dot_product_attention, [X, X, X], {}, "attention", id="attention"),
    pytest.param(functional.batch_norm, [X, X[0, :, 0], X[0, :, 0].abs()], {}, None, id="batch norm"),
    pytest.param(torch.rand_like, [X], {}, None, id="random numbers"),
    pytest.param(functional.rrelu, [X], {}, None, id="random activation"),
    pytest.param(torch.einsum, [X, X], None, None, id="einsum"),
    pytest.param(functional.conv1d, [X, torch.randn(5, 3, 2)], {}, None, id="convolution"),
]


@pytest.mark.parametrize(("func", "tensors", "others", "kind"), KINDS)
def test_kinds(func, tensors, others, kind):
    out = torch.einsum("abc,abc->a", *tensors) if others is None else func(*tensors, **others)
    assert kind_of(func, tensors, out) == kind


@pytest.mark.parametrize(
    ("func", "args", "kind"),
    [
        pytest.param(torch.full, ((2, 3), 0.5), "functions", id="full"),
        pytest.param(torch.arange, (5,), "functions", id="arange"),
        pytest.param(torch.div, (7, 2), None, id="division of numbers"),
        pytest.param(torch.where, (torch.tensor(True), 1, 2), "functions", id="numbers beside a tensor"),
    ],
)
def test_without_tensors_only_what_takes_a_dtype_and_a_device_is_made_again(func, args, kind):
    assert kind_of(func, [arg for arg in args if isinstance(arg, torch.Tensor)], func(*args)) == kind


def test_no_function_that_draws_is_made_again():
    names = ("bernoulli", "rand_like", "randn_like", "randint_like", "multinomial", "normal", "empty", "empty_like")
    for owner in (torch, torch.Tensor, functional):
        for name in (*names, "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "gumbel_softmax"):
            func = getattr(owner, name, None)
            assert func is None or kind_of(func, [X], X) is None


def test_views_and_questions_are_not_recorded():
    for func in (torch.Tensor.view, torch.transpose, torch.Tensor.__getitem__, torch.Tensor.size, torch.chunk):
        assert func in UNRECORDED
        assert kind_of(func, [X], X) is None


def test_weights_and_casts():
    assert weight_among(functional.linear, (X, WIDE)) is WIDE
    assert weight_among(torch.addmm, (X, X[0], WIDE)) is WIDE
    assert weight_among(torch.matmul, (X, X)) is None
    assert weight_among(functional.gelu, (X, WIDE)) is None
    assert weight_among(functional.linear, (X,)) is None
    assert is_product(functional.linear)
    assert autocasts(functional.linear)
    assert autocasts(functional.scaled_dot_product_attention)
    assert not is_product(functional.scaled_dot_product_attention)
    assert not autocasts(functional.layer_norm)


@pytest.mark.parametrize(
    ("args", "kwargs", "share"), [((X,), {}, 0.5), ((X, 0.1), {}, 0.1), ((X,), {"p": 0.3, "training": True}, 0.3)]
)
def test_share_that_is_dropped(args, kwargs, share):
    assert dropped_share(args, kwargs) == share


@pytest.mark.parametrize(
    ("args", "kwargs", "draws"),
    [((X, X, X), {}, False), ((X, X, X), {"dropout_p": 0.1}, True), ((X, X, X, None, 0.1), {}, True)],
)
def test_draws_in_attention(args, kwargs, draws):
    assert draws_in_attention(functional.scaled_dot_product_attention, args, kwargs) == draws
    assert not draws_in_attention(functional.dropout, args, kwargs)


def test_masks():
    mask = torch.tensor([True, False, True])
    x = torch.randn(3)
    expected = torch.where(mask, x / 0.75, 0.0)
    torch.testing.assert_close(apply_mask(x, mask, 0.75), expected)
    torch.testing.assert_close(apply_mask(x, mask / 0.75, 0.75), expected)
