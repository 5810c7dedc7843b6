"""hf_comera/ops/wide_code_kernels.py: says what the kernels cannot take."""

import pytest
import torch

from hf_comera.ops.wide_code_kernels import (
    wide_code,
    wide_code_backward,
    wide_code_refusal,
    wide_operand_refusal,
)
from hf_comera.ops.wide_input import WideForm, WideInput

GELU, GATED, DROPPED = WideForm("gelu", (0,)), WideForm("silu", (1, 0)), WideForm("relu", (0,), 1.25)


def operands(form=GELU, rank=16, rank_out=8, dtype=torch.float32, mask=None):
    make = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
    inputs = [WideInput(make(4, rank), make(rank, 40), None) for _ in range(len(form.order) if form else 1)]
    return inputs, form, [] if mask is None else [mask], make(rank_out, 40)


def changed(name, change):
    """Operands where one part of the first input was changed."""
    inputs, *others = operands()
    return [inputs[0]._replace(**{name: change(getattr(inputs[0], name))})], *others


REFUSED = {
    "unknown nonlinearity": ("none of silu", lambda: operands(None)),
    "unknown name": ("no kernel for", lambda: operands(WideForm("tanh", (0,)))),
    "one input twice": ("no kernel for", lambda: operands(WideForm("gelu", (0, 0)))),
    "three inputs": ("3 inputs", lambda: operands(WideForm("gelu", (0, 1, 2)))),
    "no mask": ("one boolean mask", lambda: operands(DROPPED)),
    "a mask too many": ("one boolean mask", lambda: operands(GELU, mask=torch.ones(4, 40, dtype=torch.bool))),
    "a mask of floats": ("one boolean mask", lambda: operands(DROPPED, mask=torch.ones(4, 40))),
    "a mask of another shape": ("the mask has", lambda: operands(DROPPED, mask=torch.ones(4, 1, dtype=torch.bool))),
    "float16": ("not torch.float16", lambda: operands(dtype=torch.float16)),
    "float64": ("not torch.float64", lambda: operands(dtype=torch.float64)),
    "mixed dtypes": ("dtypes differ", lambda: changed("code", torch.Tensor.bfloat16)),
    "a rank of 12": ("not 12", lambda: operands(rank=12)),
    "a rank of 72": ("not 72", lambda: operands(rank=72)),
    "a rank of 72 behind": ("not 72", lambda: operands(rank_out=72)),
    "a rank of 0": ("not 0", lambda: operands(rank=0)),
    "features": ("shapes do not fit", lambda: changed("right", lambda right: right[:, 1:])),
    "ranks that differ": ("shapes do not fit", lambda: changed("code", lambda code: code[:, 8:])),
    "devices": ("devices differ", lambda: changed("right", lambda right: right.to("meta"))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_says_what_it_cannot_take(case):
    words, make = REFUSED[case]
    inputs, form, masks, left = make()
    assert words in wide_code_refusal(inputs, form, masks, left)
    with pytest.raises(ValueError, match=words):
        wide_code(inputs, form, masks, left)
    with pytest.raises(ValueError, match=words):
        wide_code_backward(torch.ones(4, left.shape[0]), inputs, form, masks, left)


def test_takes_the_rest():
    assert wide_code_refusal(*operands()) is None
    assert wide_code_refusal(*operands(GATED, 64, 64, torch.bfloat16)) is None
    assert wide_code_refusal(*operands(DROPPED, mask=torch.ones(4, 40, dtype=torch.bool))) is None


def test_one_half_is_enough_to_ask_beforehand():
    assert wide_operand_refusal(torch.ones(64, 5)) is None
    assert "not 65" in wide_operand_refusal(torch.ones(65, 5))
    assert "not on meta" in wide_operand_refusal(torch.ones(64, 5, device="meta"))
