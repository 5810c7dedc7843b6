"""hf_comera/ops/cuda/tiled_mlp.py: says what the kernels cannot take."""

import pytest
import torch

from hf_comera.ops.cuda.tiled_mlp import (
    tiled_mlp,
    tiled_mlp_backward,
    tiled_mlp_refusal,
    wide_operand_refusal,
)

MASK = torch.ones(4, 40, dtype=torch.bool)


def operands(num_inputs=1, rank=16, rank_out=8, dtype=torch.float32, mask=None, scale=None):
    """Codes, right halves, masks, the left half behind, and the scale of dropout."""
    make = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
    latents, rights = [make(4, rank) for _ in range(num_inputs)], [make(rank, 40) for _ in range(num_inputs)]
    return latents, rights, [] if mask is None else [mask], make(rank_out, 40), scale


def changed(place, change):
    """Operands where the first latent (0) or right half (1) was changed."""
    found = operands()
    found[place][0] = change(found[place][0])
    return found


REFUSED = {
    "three inputs": ("3 inputs", lambda: operands(3)),
    "no mask": ("one boolean mask", lambda: operands(scale=1.25)),
    "a mask too many": ("one boolean mask", lambda: operands(mask=MASK)),
    "a mask of floats": ("one boolean mask", lambda: operands(mask=torch.ones(4, 40), scale=1.25)),
    "a mask of another shape": ("the mask has", lambda: operands(mask=MASK[:, :1], scale=1.25)),
    "float16": ("not torch.float16", lambda: operands(dtype=torch.float16)),
    "float64": ("not torch.float64", lambda: operands(dtype=torch.float64)),
    "mixed dtypes": ("dtypes differ", lambda: changed(0, torch.Tensor.bfloat16)),
    "a rank of 12": ("not 12", lambda: operands(rank=12)),
    "a rank of 72": ("not 72", lambda: operands(rank=72)),
    "a rank of 72 behind": ("not 72", lambda: operands(rank_out=72)),
    "a rank of 0": ("not 0", lambda: operands(rank=0)),
    "features": ("shapes do not fit", lambda: changed(1, lambda right: right[:, 1:])),
    "ranks that differ": ("shapes do not fit", lambda: changed(0, lambda latent: latent[:, 8:])),
    "devices": ("different devices", lambda: changed(1, lambda right: right.to("meta"))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_says_what_it_cannot_take(case):
    words, make = REFUSED[case]
    latents, rights, masks, left, scale = make()
    assert words in tiled_mlp_refusal(latents, rights, masks, left, activation="gelu", scale=scale)
    call = (latents, rights, [None for _ in latents], masks, left)
    with pytest.raises(ValueError, match=words):
        tiled_mlp(*call, activation="gelu", scale=scale)
    with pytest.raises(ValueError, match=words):
        tiled_mlp_backward(torch.ones(4, left.shape[0]), *call, activation="gelu", scale=scale)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_takes_the_rest(activation):
    for made in (operands(), operands(2, 64, 64, torch.bfloat16), operands(mask=MASK, scale=1.25)):
        *tensors, scale = made
        assert tiled_mlp_refusal(*tensors, activation=activation, scale=scale) is None


def test_says_which_activations_it_knows():
    *tensors, scale = operands()
    assert "gelu_tanh, relu, not mish" in tiled_mlp_refusal(*tensors, activation="mish", scale=scale)


def test_one_half_is_enough_to_ask_beforehand():
    assert wide_operand_refusal(torch.ones(64, 5)) is None
    assert "not 65" in wide_operand_refusal(torch.ones(65, 5))
    assert "not on meta" in wide_operand_refusal(torch.ones(64, 5, device="meta"))
