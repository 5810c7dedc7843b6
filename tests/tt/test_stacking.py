"""hf_comera/tt/stacking.py: stacks are zero-padded, and taken apart again give the same tensors."""

import pytest
import torch

from hf_comera.tt.stacking import stack_padded, unstack_padded

CASES = [  # (shapes, padded shape)
    pytest.param([(2, 3, 4)] * 3, (2, 3, 4), id="equal"),
    pytest.param([(2, 3, 4)] * 3, (2, 3, 8), id="equal-padded"),
    pytest.param([(1, 3, 4), (2, 3, 1), (2, 3, 7)], (2, 3, 8), id="ragged"),
    pytest.param([(1, 1, 1)], (5, 4, 3), id="one"),
    pytest.param([(3,), (5,)], (8,), id="one-axis"),
    pytest.param([(1, 2, 3, 4), (4, 2, 3, 1)], (4, 2, 3, 4), id="four-axes"),
]


@pytest.mark.parametrize(("shapes", "padded"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(shapes, padded, dtype):
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    stacked = stack_padded(tensors, padded)
    assert stacked.shape == (len(shapes), *padded)
    assert stacked.dtype == dtype
    for row, tensor in zip(stacked, tensors, strict=True):
        expected = torch.zeros(padded, dtype=dtype)
        expected[tuple(slice(size) for size in tensor.shape)] = tensor
        assert torch.equal(row, expected)
    again = unstack_padded(stacked, shapes)
    assert all(torch.equal(new, old) and new.is_contiguous() for new, old in zip(again, tensors, strict=True))


def test_entries_of_the_padding_are_dropped():
    parts = unstack_padded(torch.arange(18.0).view(2, 3, 3), [(1, 2), (3, 1)])
    assert torch.equal(parts[0], torch.tensor([[0.0, 1.0]]))
    assert torch.equal(parts[1], torch.tensor([[9.0], [12.0], [15.0]]))


def test_the_number_of_operations_does_not_grow_with_the_number_of_tensors():
    def count(number):
        class Count(torch.utils._python_dispatch.TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.seen += func._schema.name not in ("aten::view", "aten::split_with_sizes")
                return func(*args, **(kwargs or {}))

        tensors = [torch.randn(1 + index, 3) for index in range(number)]
        stack_padded(tensors, (number, 3))  # finds the places
        with Count() as mode:
            stacked = stack_padded(tensors, (number, 3))
            unstack_padded(stacked, [tensor.shape for tensor in tensors])
        return mode.seen

    assert count(3) == count(30) <= 4
