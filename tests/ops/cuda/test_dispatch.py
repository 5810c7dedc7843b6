"""hf_comera/ops/cuda/dispatch.py: a kernel runs where it is on, serves the device and takes the arguments."""

import pytest
import torch

from hf_comera.ops.cuda import dispatch as module
from hf_comera.ops.cuda import switch
from hf_comera.ops.cuda.dispatch import (
    NoKernelError,
    check_taken,
    kernels_serve,
    place_refusal,
    register_cuda_kernel,
    serve_devices,
)


@torch.library.custom_op("hf_comera_tests::whose", mutates_args=())
def whose(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.new_zeros(())


def kernel(x, number):
    check_taken("whose", "numbers are even" if number % 2 else None)
    return x.new_ones(())


register_cuda_kernel(whose, kernel)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(switch, "_wanted", False)
    yield
    serve_devices("cuda")


@pytest.mark.parametrize(
    ("wanted", "kind", "number", "by_kernel"),
    [(True, "cpu", 2, True), (True, "cpu", 3, False), (False, "cpu", 2, False), (True, "cuda", 2, False)],
    ids=["taken", "refused", "off", "another-device"],
)
def test_what_runs(wanted, kind, number, by_kernel, monkeypatch):
    serve_devices(kind)
    monkeypatch.setattr(switch, "_wanted", wanted)
    assert bool(whose(torch.empty(1), number)) is by_kernel


def test_operators_that_come_later_serve_the_same_devices(monkeypatch):
    serve_devices("cpu")
    monkeypatch.setattr(switch, "_wanted", True)
    late = torch.library.custom_op(
        "hf_comera_tests::late", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    register_cuda_kernel(late, lambda x: x + 2)
    assert late(torch.zeros(())) == 2


def test_other_errors_of_a_kernel_come_through(monkeypatch):
    serve_devices("cpu")
    monkeypatch.setattr(switch, "_wanted", True)
    failing = torch.library.custom_op(
        "hf_comera_tests::failing", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    register_cuda_kernel(failing, lambda x: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        failing(torch.zeros(()))


def test_a_refusal_says_who_and_why():
    with pytest.raises(NoKernelError, match="whose has no kernel for this: numbers are even"):
        kernel(torch.empty(1), 3)


@pytest.mark.parametrize(
    ("wanted", "kind", "refusal", "serve"),
    [
        (True, "cuda", None, True),
        (True, "cuda", "no nvcc", False),
        (False, "cuda", None, False),
        (True, "cpu", None, False),
    ],
)
def test_which_devices_are_served(wanted, kind, refusal, serve, monkeypatch):
    monkeypatch.setattr(switch, "_wanted", wanted)
    monkeypatch.setattr(module, "kernels_refusal", lambda device: refusal)
    assert kernels_serve(torch.device(kind)) is serve


def test_compiled_and_transformed_code_is_plain_torch(monkeypatch):
    serve_devices("cpu")
    monkeypatch.setattr(switch, "_wanted", True)
    seen = []

    def ask(x):
        seen.append(kernels_serve(x.device))
        return x.sum()

    ask(torch.ones(2))
    torch.func.grad(ask)(torch.ones(2))
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        ask(torch.ones(2))
    assert seen == [True, False, False]


@pytest.mark.parametrize(
    ("devices", "words"),
    [(("cpu", "meta"), "different devices: cpu, meta"), (("meta",), "not on meta"), (("cpu",), None)],
)
def test_where_tensors_must_be(devices, words):
    found = place_refusal(*(torch.empty(1, device=device) for device in devices))
    assert found is None if words is None else words in found
