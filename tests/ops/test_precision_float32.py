"""hf_comera/ops/precision.py: products are exact within, and torch's settings are as they were afterwards."""

import contextlib

import pytest
import torch

from hf_comera.ops.precision import exact_float32_products, uses_tf32
from tests.ops.float32_settings import SETTINGS, choose, told

every_setting = pytest.mark.parametrize("name", SETTINGS)


@every_setting
def test_exact_within_and_as_before_afterwards(name):
    choose(name)
    expected = told()
    choose(name)
    with exact_float32_products():
        assert not uses_tf32()
        assert torch.backends.cuda.matmul.fp32_precision in ("ieee", "none")
        assert torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none")
    assert told() == expected


@every_setting
def test_a_body_that_raises_changes_no_setting(name):
    choose(name)
    expected = told()
    choose(name)
    with contextlib.suppress(KeyError), exact_float32_products(), exact_float32_products():
        raise KeyError
    assert told() == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", False),
        ("all tf32", True),
        ("all exact", False),
        ("CUDA products tf32", True),
        ("cuDNN tf32", True),
        ("CPU products tf32", False),
        ("legacy highest", False),
        ("legacy high", True),
        ("legacy medium", True),
        ("legacy allow_tf32", True),
    ],
)
def test_tf32_is_seen_however_it_was_set(name, expected):
    choose(name)
    assert uses_tf32() is expected


def test_a_setting_that_follows_another_goes_on_following_it():
    torch.backends.fp32_precision = "tf32"
    with exact_float32_products():
        pass
    torch.backends.fp32_precision = "ieee"
    assert not uses_tf32()


def test_a_product_is_exact_where_the_machine_could_make_it_of_bf16():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    expected = a @ b
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    with exact_float32_products():
        assert torch.equal(a @ b, expected)
