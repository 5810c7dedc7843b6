"""How exact a kernel must be: at most twice the error of plain torch in the same format, against float64."""

import contextlib

import torch

# Rounding of a result that torch happened to hit exactly.
ROUNDING = {"bf16": 2.0**-9, "tf32": 2.0**-12, "fp32": 2.0**-24}
DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}


@contextlib.contextmanager
def precision(name):
    """What float32 products may be made of: tf32, where ``name`` says so."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def product(name, a, b):
    """Plain torch's ``a @ b`` in a format, on a CPU too: tf32 rounds both sides to 11 bits."""
    if name == "tf32" and a.dtype == torch.float32:
        a, b = tf32(a), tf32(b)
    return a @ b


def tf32(a):
    return ((a.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def error(found, exact):
    exact = exact.detach().to("cpu", torch.float64)
    difference = (found.detach().to("cpu", torch.float64) - exact).norm()
    return (difference / exact.norm().clamp_min(1e-30)).item()


def assert_as_exact(name, found, torch_result, exact):
    """``name`` is a format; the three are the kernel's, plain torch's and the float64 result."""
    assert found.shape == exact.shape
    bound = max(2 * error(torch_result, exact), 2 * ROUNDING[name])
    assert error(found, exact) <= bound, f"{error(found, exact):.2e} > {bound:.2e}"


def between_nans(tensor):
    """The same numbers with NaN before and after them in memory: reading past an end shows."""
    padded = tensor.new_full((tensor.numel() + 64,), float("nan"))
    inner = padded[32:-32]
    inner.copy_(tensor.reshape(-1))
    return inner.view(tensor.shape)
