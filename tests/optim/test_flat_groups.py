"""hf_comera/optim/flat_groups.py: tensors become groups within their rows, and come back from them."""

import pytest
import torch

from hf_comera.optim.flat_groups import LONGEST_LOOP, FlatGroups, Layout, layout_of

LAYOUTS = {
    (64, 768): Layout(64, 768, 128, True),
    (5, 300): Layout(5, 300, 128, True),
    (32, 8, 32): Layout(32, 256, 128, True),
    (64, 80): Layout(64, 80, 80, True),
    (0, 96): Layout(0, 96, 96, True),
    (1, 8, 32): Layout(1, 256, 128, True),
    (64, 79): Layout(1, 64 * 79, 128, True, is_whole=True),
    (64, 130): Layout(1, 64 * 130, 128, True, is_whole=True),
    (2**12, 130): Layout(2**12, 130, 128, True),
    (32, 12, 1): Layout(1, 384, 128, True, is_whole=True),
    (2**15, 12): Layout(2**15, 12, 12, True),
    (2**17, 4): Layout(2**19, 1, 1, False),
    (9, 7): Layout(1, 63, 128, True, is_whole=True),
    (768,): Layout(1, 768, 128, True, is_whole=True),
    (7,): Layout(7, 1, 1, False),
    (): Layout(1, 1, 1, False),
    (4, 0): Layout(0, 1, 1, False),
}


@pytest.mark.parametrize(("shape", "layout"), LAYOUTS.items(), ids=str)
def test_layout(shape, layout):
    assert layout_of(torch.Size(shape)) == layout


SHAPES = {
    "large": [(4, 256), (3, 300), (2, 5, 80)],
    "short": [(2**15, 12), (2**15, 4, 3)],
    "vectors": [(80,), (9, 7), (30, 12, 1)],
    "tiny": [(7,), (), (2, 3)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_there_and_back(shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    flat = FlatGroups([layout_of(tensor.shape) for tensor in tensors])
    groups = flat.gather(tensors)
    num_groups = sum(layout.num_groups for layout in flat.layouts)
    assert groups.shape == (-(-num_groups // LONGEST_LOOP) * LONGEST_LOOP, flat.layouts[0].size)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    flat.scatter(groups, copies)
    assert all(map(torch.equal, copies, tensors))
    numbers = flat.spread(torch.arange(1.0, 1 + len(tensors)).unbind())
    flat.scatter(numbers * torch.ones_like(groups), copies)
    assert all((copied == number).all() for number, copied in enumerate(copies, 1))


def test_scales_there_and_back():
    flat = FlatGroups([layout_of(torch.Size(shape)) for shape in SHAPES["large"]])
    scales = [torch.randn(layout.scales_shape) for layout in flat.layouts]
    copies = [torch.zeros_like(scale) for scale in scales]
    flat.scatter_scales(flat.gather_scales(scales), copies)
    assert all(map(torch.equal, copies, scales))


def test_gathered_groups_have_memory_of_their_own():
    tensor = torch.zeros(64, 128)
    FlatGroups([layout_of(tensor.shape)]).gather([tensor]).add_(1)
    assert not tensor.any()
