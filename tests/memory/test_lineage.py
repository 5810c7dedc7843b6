"""hf_comera/memory/lineage.py: a storage is known as long as it lives and is not written to, and no longer."""

import gc
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_comera.memory.lineage import Call, Input, Lineage, Place, is_plain


def test_views_are_found_by_their_storage():
    lineage, tensor = Lineage(), torch.randn(4, 6)
    node = lineage.node(tensor)
    for view in (tensor, tensor.t(), tensor[1:], tensor.detach(), tensor.view(torch.int32)):
        assert lineage.find(view) is node
        assert lineage.node(view) is node
    assert lineage.find(tensor.clone()) is None


def test_what_was_written_to_is_new():
    lineage, tensor = Lineage(), torch.randn(4, 6)
    node = lineage.node(tensor)
    tensor[0].add_(1)
    assert lineage.find(tensor) is None
    assert lineage.node(tensor) is not node
    assert lineage.node(tensor).version == 1
    assert node.version == 0


def test_an_address_that_is_used_again_is_not_mistaken():
    lineage, seen = Lineage(), set()
    for _ in range(200):
        tensor = torch.randn(1000)
        seen.add(tensor.data_ptr())
        assert lineage.find(tensor) is None
        lineage.add(tensor, None)
        del tensor
    assert len(seen) < 200  # memory was used again


def test_entries_of_storages_that_are_gone_are_swept():
    lineage, kept = Lineage(), [torch.randn(2) for _ in range(600)]
    nodes = [lineage.node(tensor) for tensor in kept]
    for _ in range(5000):
        lineage.add(torch.randn(2), None)
        assert len(lineage._nodes) <= 1024 + 2 * 1024
    assert [lineage.find(tensor) for tensor in kept] == nodes


def test_no_tensor_is_held_but_parameters():
    lineage, tensor, parameter = Lineage(), torch.randn(3), nn.Parameter(torch.randn(3))
    node, of_parameter = lineage.node(tensor), lineage.node(parameter)
    assert node.tensor() is tensor
    assert node.parameter is None
    assert of_parameter.parameter.data_ptr() == parameter.data_ptr()
    assert not of_parameter.parameter.requires_grad
    del tensor
    gc.collect()
    assert node.tensor() is None


def test_a_call_is_made_again_with_other_tensors():
    inputs = {"list": [Input(0), (Input(1), 2)], "number": 3}
    call = Call(lambda *args, **kwargs: (args, kwargs), (Input(1), "text"), inputs, "functions", [], None)
    left, right = torch.zeros(1), torch.ones(1)
    args, kwargs = call([left, right])
    assert args == (right, "text")
    assert kwargs == {"list": [left, (right, 2)], "number": 3}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("around", [True, False])
def test_a_call_is_made_again_in_its_autocast_mode(dtype, around):
    call = Call(torch.mm, (Input(0), Input(0)), {}, "products", [], ("cpu", dtype))
    with torch.autocast("cpu", torch.float16, enabled=around):
        assert call([torch.eye(2)]).dtype == (dtype or torch.float32)


def in_inference_mode():
    with torch.inference_mode():
        return torch.ones(2)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def fake():
    with FakeTensorMode():
        return torch.ones(2)


COMPLEX = torch.ones(2, dtype=torch.complex64)
PLAIN = {
    "tensor": (lambda: torch.ones(2), True),
    "parameter": (lambda: nn.Parameter(torch.ones(2)), True),
    "complex": (lambda: COMPLEX, True),
    "real part": (lambda: COMPLEX.conj().real, True),
    "fake": (fake, True),
    "conjugate": (lambda: COMPLEX.conj(), False),
    "imaginary part of a conjugate": (lambda: COMPLEX.conj().imag, False),
    "sparse": (lambda: torch.eye(2).to_sparse(), False),
    "nested": (nested, False),
    "inference": (in_inference_mode, False),
    "subclass": (lambda: torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})), False),
}


@pytest.mark.parametrize(("make", "plain"), PLAIN.values(), ids=PLAIN)
def test_plain_tensors(make, plain):
    assert is_plain(make()) == plain


def test_tensors_that_a_transform_follows_are_not_plain():
    seen = []
    torch.vmap(lambda row: seen.append(is_plain(row)) or row)(torch.ones(2, 2))
    assert seen == [False]


def test_places():
    tensor = torch.randn(4, 6)
    assert Place.of(tensor[1:, ::2]) == Place(torch.Size((3, 3)), (6, 2), 6, torch.float32)
    assert Place.of(tensor) != Place.of(tensor.view(torch.int32))
