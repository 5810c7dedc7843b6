"""hf_comera/ops/tiled_mlp.py: equals the hidden layer written out, saves latents, and is never wider than a chunk."""

import pytest
import torch
from transformers.activations import ACT2FN

from hf_comera.modules.tiled_mlp import ACTIVATION_NAMES
from hf_comera.ops import bit_dropout
from hf_comera.ops import tiled_mlp as module
from hf_comera.ops.tiled_mlp import ACTIVATIONS, HiddenInput, tiled_mlp

OF_TRANSFORMERS = {ours: name for name, ours in reversed(ACTIVATION_NAMES.items())}
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
each_gate = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
each_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two rows of twelve hidden features at a time."""
    monkeypatch.setattr(module, "CHUNK_ENTRIES", {"cpu": 24, "cuda": 24})


def problem(rows=7, hidden=12, gated=True, bias=True, dropped=False, dtype=torch.float64):
    """The tensors of an operator in their order, and what dropout keeps."""

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()

    maps = []
    for rank in (3, 5)[: 1 + gated]:
        maps += [random(rows, rank), random(rank, hidden), random(hidden) if bias else None]
    bits = bit_dropout.draw_kept((rows, hidden), 0.3) if dropped else None
    return [*maps, *[None] * (6 - len(maps)), random(4, hidden)], bits


def ours(tensors, bits, activation):
    inner, gate, left = HiddenInput(*tensors[:3]), HiddenInput(*tensors[3:6]), tensors[6]
    return tiled_mlp(
        inner, left, activation=activation, gate=None if gate.latent is None else gate, bits=bits, share=0.7
    )


def written_out(tensors, bits, activation):
    wides = [
        tensors[place] @ tensors[place + 1] + (0 if tensors[place + 2] is None else tensors[place + 2])
        for place in (0, 3)
        if tensors[place] is not None
    ]
    hidden = ACT2FN[OF_TRANSFORMERS[activation]](wides[0])
    hidden = hidden * wides[1] if len(wides) == 2 else hidden
    if bits is not None:
        hidden = hidden * bit_dropout.kept_factors(bits, hidden.shape[1], 1.0, hidden.dtype) / 0.7
    return hidden @ tensors[6].T


def gradients(y, tensors, grad):
    return torch.autograd.grad(y, [tensor for tensor in tensors if tensor is not None], grad)


@pytest.mark.parametrize("dropped", [False, True], ids=["all", "dropped"])
@pytest.mark.parametrize("rows", [0, 1, 7, 8])
@each_bias
@each_gate
@each_activation
def test_equals_the_hidden_layer_written_out(activation, gated, bias, rows, dropped):
    tensors, bits = problem(rows, gated=gated, bias=bias, dropped=dropped)
    found, expected = ours(tensors, bits, activation), written_out(tensors, bits, activation)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    torch.testing.assert_close(gradients(found, tensors, grad), gradients(expected, tensors, grad))


@pytest.mark.parametrize("hidden", [1, 5, 30, 100])
@pytest.mark.parametrize("entries", [1, 60, 10**6])
def test_chunks_of_any_size(entries, hidden, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ENTRIES", {"cpu": entries, "cuda": entries})
    tensors, bits = problem(hidden=hidden, dropped=True)
    found, expected = ours(tensors, bits, "gelu"), written_out(tensors, bits, "gelu")
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    torch.testing.assert_close(gradients(found, tensors, grad), gradients(expected, tensors, grad))


@pytest.mark.parametrize("dropped", [False, True], ids=["all", "dropped"])
@each_gate
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "silu"])
def test_gradients_of_gradients(activation, gated, dropped):
    tensors, bits = problem(rows=3, hidden=5, gated=gated, dropped=dropped)
    there = [tensor for tensor in tensors if tensor is not None]

    def function(*given):
        given = iter(given)
        return ours([None if tensor is None else next(given) for tensor in tensors], bits, activation)

    assert torch.autograd.gradcheck(function, there)
    assert torch.autograd.gradgradcheck(function, there)


@each_bias
@each_gate
def test_the_contract_of_operators(gated, bias):
    tensors, bits = problem(gated=gated, bias=bias, dropped=True)
    torch.library.opcheck(torch.ops.hf_comera.tiled_mlp.default, (*tensors, bits, "gelu", 0.7))
    given = [None if tensor is None else tensor.detach() for tensor in tensors]
    torch.library.opcheck(
        torch.ops.hf_comera.tiled_mlp_backward.default,
        (torch.randn(7, 4, dtype=torch.float64), *given, bits, "gelu", 0.7),
    )


@pytest.mark.parametrize("frozen", range(7))
def test_frozen_tensors_have_no_gradient_and_others_all_of_it(frozen):
    tensors, bits = problem()
    expected = gradients(ours(tensors, bits, "silu").sum(), tensors, None)
    tensors[frozen].requires_grad_(False)
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    found = list(torch.autograd.grad(ours(tensors, bits, "silu").sum(), trained))
    torch.testing.assert_close(found, [*expected[:frozen], *expected[frozen + 1 :]])


@each_gate
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_at_most_twice_as_far_off(dtype, gated):
    tensors, bits = problem(rows=64, hidden=96, gated=gated, dropped=True, dtype=dtype)
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in tensors]
    found, plain, wanted = (
        function(given, bits, "gelu")
        for function, given in ((ours, tensors), (written_out, tensors), (written_out, exact))
    )
    grad = torch.randn_like(found)
    all_found, all_plain, all_wanted = (
        [y, *gradients(y, given, grad.to(y.dtype))]
        for y, given in ((found, tensors), (plain, tensors), (wanted, exact))
    )
    for one, other, third in zip(all_found, all_plain, all_wanted, strict=True):
        assert one.dtype == dtype
        assert (one - third).norm() <= 2 * (other - third).norm() + 1e-9


def test_a_tensor_in_two_places_gets_both_gradients():
    tensors, _ = problem()
    tensors[3:6] = tensors[:3]
    y, expected = ours(tensors, None, "silu"), written_out(tensors, None, "silu")
    found = torch.autograd.grad(y.sum(), [tensors[0], tensors[6]])
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), [tensors[0], tensors[6]]))


def test_saved_are_its_inputs_alone():
    tensors, bits = problem(rows=50, dropped=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        ours(tensors, bits, "gelu")
    assert {tensor.data_ptr() for tensor in saved} <= {tensor.data_ptr() for tensor in (*tensors, bits)}


def test_transforms_exporters_and_forward_derivatives_see_plain_functions():
    tensors, _ = problem()
    given = [tensor.detach() for tensor in tensors]
    function = lambda latent: ours([latent, *given[1:]], None, "gelu")  # noqa: E731
    expected = torch.autograd.functional.jacobian(
        lambda latent: written_out([latent, *given[1:]], None, "gelu"), given[0]
    )
    torch.testing.assert_close(torch.func.jacrev(function)(given[0]), expected)
    torch.testing.assert_close(torch.func.jacfwd(function)(given[0]), expected)
    torch.testing.assert_close(torch.vmap(function)(given[0].expand(2, -1, -1))[1], function(given[0]))

    class Block(torch.nn.Module):
        def forward(self, latent):
            return function(latent)

    program = torch.export.export(Block(), (given[0],))
    assert "hf_comera" not in str(program.graph)
    torch.testing.assert_close(program.module()(given[0]), function(given[0]))


@pytest.mark.gpu
@each_gate
@each_activation
def test_on_a_gpu(activation, gated):
    tensors, _ = problem(gated=gated)
    bits = bit_dropout.draw_kept((7, 12), 0.3, "cuda")
    there = [None if tensor is None else tensor.detach().cuda().requires_grad_() for tensor in tensors]
    found, expected = ours(there, bits, activation), written_out(tensors, bits.cpu(), activation)
    torch.testing.assert_close(found.cpu(), expected)
    grad = torch.randn_like(expected)
    found_grads = [each.cpu() for each in gradients(found, there, grad.cuda())]
    torch.testing.assert_close(found_grads, list(gradients(expected, tensors, grad)))
