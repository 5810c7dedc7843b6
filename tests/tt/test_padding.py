"""hf_comera/tt/padding.py: tensors of any sizes become zero-padded stacks and come back as they were."""

import pytest
import torch

from hf_comera.tt.padding import RaggedStacks

CASES = {
    "one tensor": [[(2, 3)]],
    "equal": [[(1, 4, 3), (1, 4, 3)], [(3, 2, 1), (3, 2, 1)]],
    "other ranks": [[(1, 4, 3), (1, 4, 1), (1, 4, 6)], [(3, 2, 1), (1, 2, 1), (6, 2, 1)]],
    "one stack of two is ragged": [[(1, 4, 3), (1, 4, 3)], [(3, 2, 5), (3, 2, 1)]],
    "every axis": [[(1, 4), (3, 2), (2, 5)]],
    "four axes": [[(2, 3, 2, 5), (4, 3, 2, 1)], [(5, 1, 7, 1), (1, 1, 7, 1)]],
    "stacks of other lengths": [[(2, 2), (3, 1)], [(4,)], [(1, 1, 1), (2, 1, 1), (1, 1, 2)]],
}
cases = pytest.mark.parametrize("shapes", CASES.values(), ids=CASES)


def drawn(shapes, **settings):
    torch.manual_seed(0)
    return [[torch.randn(shape, **settings) for shape in of_stack] for of_stack in shapes]


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packing_pads_with_zeros_and_unpacking_gives_the_tensors_back(shapes, dtype):
    stacks = drawn(shapes, dtype=dtype)
    ragged = RaggedStacks(shapes)
    packed = ragged.pack(stacks)
    for tensors, stacked in zip(stacks, packed, strict=True):
        expected = torch.zeros_like(stacked)
        for row, tensor in zip(expected, tensors, strict=True):
            row[tuple(slice(size) for size in tensor.shape)] = tensor
        assert torch.equal(stacked, expected)
        assert stacked.shape[1:] == tuple(max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True))
    unpacked = ragged.unpack([stacked.flatten(1) for stacked in packed])
    for tensor, back in zip([tensor for tensors in stacks for tensor in tensors], unpacked, strict=True):
        assert torch.equal(tensor, back)


@cases
def test_it_is_differentiable(shapes):
    stacks = drawn(shapes, dtype=torch.float64, requires_grad=True)
    ragged = RaggedStacks(shapes)
    flat = [tensor for tensors in stacks for tensor in tensors]
    assert torch.autograd.gradcheck(lambda *_: tuple(ragged.pack(stacks)), flat)
    assert torch.autograd.gradcheck(lambda *_: tuple(ragged.unpack(ragged.pack(stacks))), flat)


def test_padding_is_cut_off_whatever_is_in_it():
    stacks = drawn(CASES["other ranks"])
    ragged = RaggedStacks(CASES["other ranks"])
    padding = ragged.pack([[torch.ones_like(tensor) for tensor in tensors] for tensors in stacks])
    dirty = [stacked + (1 - live) for stacked, live in zip(ragged.pack(stacks), padding, strict=True)]
    for tensor, back in zip([tensor for tensors in stacks for tensor in tensors], ragged.unpack(dirty), strict=True):
        assert torch.equal(tensor, back)


def test_tensors_need_not_be_contiguous():
    shapes = [[(2, 3), (4, 1)]]
    tensors = [torch.randn(3, 2).T, torch.randn(1, 4).T]
    assert all(map(torch.equal, RaggedStacks(shapes).unpack(RaggedStacks(shapes).pack([tensors])), tensors))
