"""hf_comera/modules/cached_codes.py: what is done to codes is what is done to the tensors that they stand for."""

import copy

import pytest
import torch

from hf_comera.modules.unwritten_heads import UnwrittenHeads
from tests.modules.attention_blocks import HEADS, SIZE, attend, split
from tests.modules.conftest import watched

RANK = 5


@pytest.fixture
def uses(monkeypatch):
    return watched(monkeypatch, UnwrittenHeads, "code", "_made")


def in_heads(right, batch=3, tokens=4, grad=False, dtype=torch.float64):
    """A key or a value in heads, as stand-in and as tensor."""
    code = torch.randn(batch, tokens, RANK, dtype=dtype, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        return split(UnwrittenHeads.of(code, right, HEADS)), split(code @ right.to(dtype))


@pytest.fixture
def right():
    return torch.randn(RANK, HEADS * SIZE, dtype=torch.float64)


CHANGES = {
    "selected": lambda x: x.index_select(0, torch.tensor([2, 0, 0])),
    "indexed": lambda x: x[torch.tensor([1, 2]), ...],
    "masked": lambda x: x[torch.tensor([True, False, True]), ...],
    "repeated": lambda x: x.repeat_interleave(2, dim=0),
    "cropped": lambda x: x[..., :-2, :],
    "first": lambda x: x[..., :1, :],
    "copied": copy.deepcopy,
}


CHANGES_OF_TWO = {name: CHANGES[name] for name in ("repeated", "cropped", "first")}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_made_of_codes(change, right, uses):
    stand_in, tensor = in_heads(right)
    changed = CHANGES[change](stand_in)
    assert isinstance(changed, UnwrittenHeads)
    assert uses == []
    torch.testing.assert_close(changed.real(), CHANGES[change](tensor))


OTHERS = {
    "one text by a tensor": lambda x: x[torch.tensor(1), ...],
    "texts in two dimensions": lambda x: x[torch.tensor([[0, 1], [2, 0]]), ...],
    "a mask of heads": lambda x: x[torch.ones(3, HEADS, dtype=torch.bool), ...],
    "selected by a list": lambda x: x[[0, 1]],
    "features": lambda x: x[..., 2:],
    "heads": lambda x: x.index_select(1, torch.tensor([2, 0])),
    "one text": lambda x: x[0],
    "several times each": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), dim=0),
    "tokens repeated": lambda x: x.repeat_interleave(2, dim=2),
    "heads in front": lambda x: torch.cat([x, x], dim=1),
}


@pytest.mark.parametrize("change", OTHERS)
def test_other_changes_are_made_of_the_tensor(change, right):
    stand_in, tensor = in_heads(right)
    changed = OTHERS[change](stand_in)
    assert type(changed) is torch.Tensor
    torch.testing.assert_close(changed, OTHERS[change](tensor))


@pytest.mark.parametrize("grad", [False, True])
def test_later_tokens_join(grad, right, uses):
    parts = [in_heads(right.clone(), tokens=tokens, grad=grad) for tokens in (4, 1, 2)]
    with torch.set_grad_enabled(grad):
        joined = torch.cat([torch.cat([parts[0][0], parts[1][0]], dim=-2), parts[2][0]], dim=2)
    assert isinstance(joined, UnwrittenHeads)
    assert joined.requires_grad == grad
    assert uses == []
    torch.testing.assert_close(joined.real(), torch.cat([tensor for _, tensor in parts], dim=2))


MISFITS = {
    "another half": lambda right: in_heads(right + 1),
    "another dtype": lambda right: in_heads(right, dtype=torch.float32),
    "a half that trains": lambda right: in_heads(right.clone().requires_grad_(), grad=True),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_stands_for_something_else_is_written_out(misfit, right):
    one, other = in_heads(right), MISFITS[misfit](right)
    joined = torch.cat([one[0], other[0]], dim=-2)
    assert type(joined) is torch.Tensor
    torch.testing.assert_close(joined, torch.cat([one[1], other[1]], dim=-2))


@torch.no_grad()
def test_key_and_value_of_one_code_go_on_sharing_it(right):
    def key_and_value(tokens):
        code = torch.randn(2, tokens, RANK, dtype=torch.float64)
        whole = UnwrittenHeads.of(code, torch.cat([right, right + 1], dim=1), 2 * HEADS)
        return [split(part) for part in whole.split(HEADS * SIZE, dim=2)]

    joined = [torch.cat(pair, dim=-2) for pair in zip(key_and_value(4), key_and_value(1), strict=True)]
    changes = [lambda x: x, lambda x: x.index_select(0, torch.tensor([1, 0])), *CHANGES_OF_TWO.values()]
    for key, value in (*([change(part) for part in joined] for change in changes), copy.deepcopy(joined)):
        assert key._codes.code is value._codes.code


@torch.no_grad()
def test_what_was_shared_before_is_not_taken_for_something_else(right):
    (stand_in, tensor), index = in_heads(right), torch.tensor([2, 0])
    kept = [stand_in.index_select(0, index), stand_in[..., :2, :]]
    index.copy_(torch.tensor([1, 1]))
    torch.testing.assert_close(stand_in.index_select(0, index).real(), tensor.index_select(0, index))
    torch.testing.assert_close(stand_in[..., :3, :].real(), tensor[..., :3, :])
    assert len(kept) == 2


@torch.no_grad()
@pytest.mark.parametrize("change", [*CHANGES.values(), lambda x: torch.cat([x, x], dim=2)])
def test_what_attention_has_made_is_no_key(change, right):
    parts = [in_heads(right) for _ in range(3)]
    found, wanted = (torch.nn.functional.scaled_dot_product_attention(*(part[k] for part in parts)) for k in (0, 1))
    assert isinstance(found, UnwrittenHeads)
    torch.testing.assert_close(change(found) * 1.0, change(wanted))


def test_attention_of_a_single_token_is_that_of_tensors(right):
    rights = [right, right + 1, right - 1]
    query, key, value = (
        in_heads(half, tokens=tokens, grad=True) for half, tokens in zip(rights, (1, 6, 6), strict=True)
    )
    masks = [None, torch.rand(3, 1, 1, 6) < 0.7, torch.randn(3, HEADS, 1, 6, dtype=torch.float64)]
    for mask in masks:
        found, wanted = (attend(query[k], key[k], value[k], attn_mask=mask) for k in (0, 1))
        torch.testing.assert_close(found.view(-1), wanted.view(-1))
