"""hf_comera/tt/cores.py: gates are diagonal matrices between the cores; slicing copies ranks exactly."""

import pytest
import torch

from hf_comera.tt.cores import scale_cores, slice_core
from tests.dense_references import multiply_out

TRAINS = [  # shapes of the cores
    pytest.param([(1, 5, 1)], id="one-core"),
    pytest.param([(1, 5, 3), (3, 4, 1)], id="two-cores"),
    pytest.param([(1, 2, 2), (2, 7, 5), (5, 3, 1)], id="three-cores"),
    pytest.param([(1, 3, 3), (3, 1, 1), (1, 5, 2), (2, 4, 1)], id="four-cores-a-rank-of-one"),
    pytest.param([(1, 3, 2, 5), (5, 4, 1, 3), (3, 2, 3, 1)], id="ttm-cores"),
]
every_train = pytest.mark.parametrize("shapes", TRAINS)


def cores_and_gates(shapes, dtype=torch.float64):
    cores = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    gate_dtype = torch.promote_types(dtype, torch.float32)
    return cores, [torch.randn(shape[-1], dtype=gate_dtype, requires_grad=True) for shape in shapes[:-1]]


def multiply_by_diagonals(cores, gates):
    """``G_1 D_1 G_2 D_2 ... G_K`` with the middle axes of each core as one."""
    product = cores[0].reshape(1, -1, cores[0].shape[-1])
    for core, gate in zip(cores[1:], gates, strict=True):
        flat = core.reshape(core.shape[0], -1, core.shape[-1])
        product = torch.einsum("anr,rs,smb->anmb", product, torch.diag(gate), flat).flatten(1, 2)
    return product.flatten()


@every_train
def test_equals_diagonal_matrices_between_the_cores(shapes):
    cores, gates = cores_and_gates(shapes)
    scaled = scale_cores(cores, gates)
    flat = [core.reshape(core.shape[0], -1, core.shape[-1]) for core in scaled]
    result, expected = multiply_out(flat).flatten(), multiply_by_diagonals(cores, gates)
    assert [core.shape for core in scaled] == [core.shape for core in cores]
    torch.testing.assert_close(result, expected)
    weights = torch.randn_like(expected)
    grads = [torch.autograd.grad((out * weights).sum(), [*cores, *gates]) for out in (result, expected)]
    torch.testing.assert_close(*grads)


@every_train
def test_without_gates_the_cores_are_the_same_objects(shapes):
    cores, _ = cores_and_gates(shapes)
    assert all(scaled is core for scaled, core in zip(scale_cores(cores, []), cores, strict=True))


@every_train
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_rounded_once_to_the_dtype_of_the_cores(shapes, dtype):
    cores, gates = cores_and_gates(shapes, dtype)
    assert all(gate.dtype == torch.float32 for gate in gates)
    *scaled, last = scale_cores(cores, gates)
    assert last is cores[-1]
    for core, gate, result in zip(cores[:-1], gates, scaled, strict=True):
        assert torch.equal(result, (core.float() * gate).to(dtype))
        assert result.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ones_change_no_bit(dtype):
    cores, gates = cores_and_gates([(1, 2, 2), (2, 7, 5), (5, 3, 1)], dtype)
    scaled = scale_cores(cores, [torch.ones_like(gate) for gate in gates])
    assert all(torch.equal(new, core) for new, core in zip(scaled, cores, strict=True))


def test_another_number_of_gates_is_an_error():
    cores, gates = cores_and_gates([(1, 2, 2), (2, 7, 5), (5, 3, 1)])
    with pytest.raises(ValueError, match="zip"):
        scale_cores(cores, gates[:1])


@pytest.mark.parametrize("before", [None, [2], [0, 3], []], ids=str)
@pytest.mark.parametrize("behind", [None, [4], [1, 2, 4], []], ids=str)
@pytest.mark.parametrize("middle", [(3,), (3, 2)], ids=str)
def test_slices_keep_the_named_ranks(before, behind, middle):
    core = torch.randn(4, *middle, 5)
    sliced = slice_core(core, *(None if index is None else torch.tensor(index).long() for index in (before, behind)))
    expected = core[range(4) if before is None else before][..., range(5) if behind is None else behind]
    assert torch.equal(sliced, expected)
    assert sliced.is_contiguous()


def test_gates_are_sliced_on_their_only_axis():
    assert slice_core(torch.arange(5.0), None, torch.tensor([0, 3])).tolist() == [0.0, 3.0]


def test_ranks_that_are_cut_were_those_with_gates_of_zero():
    cores, gates = cores_and_gates([(1, 4, 4), (4, 3, 5), (5, 4, 1)])
    kept = [torch.tensor([0, 2]), torch.tensor([1, 3, 4])]
    masked = [torch.zeros_like(gate).index_fill(0, index, 1) * gate for gate, index in zip(gates, kept, strict=True)]
    bonds = [None, *kept, None]
    cut_cores = [slice_core(core, *bonds[place : place + 2]) for place, core in enumerate(cores)]
    cut_gates = [gate[index] for gate, index in zip(gates, kept, strict=True)]
    torch.testing.assert_close(multiply_by_diagonals(cut_cores, cut_gates), multiply_by_diagonals(cores, masked))
