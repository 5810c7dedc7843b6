"""kernels/coat_adamw.cu: steps and new codes are those of CoatAdamW in plain torch, special entries included."""

import copy
import math
import subprocess
from typing import NamedTuple

import pytest
import torch
from torch import nn

from hf_comera.ops import use_kernels
from hf_comera.ops.cuda.build import find_gcc, sources_folder
from hf_comera.ops.cuda.coat_adamw import coat_adamw_refusal, coat_adamw_step
from hf_comera.ops.fp8 import dequantise, quantise
from hf_comera.optim import CoatAdamW, coat_adamw
from tests.kernels.kernel_errors import assert_as_exact

RULE = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
RULES = {
    "defaults": {},
    "other-betas": {"betas": (0.3, 0.95), "eps": 1e-3},
    "no-memory": {"betas": (0.0, 0.0), "weight_decay": 0.0},
}
SHAPES = {
    "groups": [(9, 128)],
    "uneven-rows": [(5, 300), (7, 129)],
    "short-rows": [(20, 12), (3, 1)],
    "whole": [(1, 400)],
    "more-than-a-launch": [(2, 30)] * 60,
    "empty": [(0, 40), (2, 8)],
}


class QuantisedParameter(NamedTuple):
    """A parameter and what is kept of its moments."""

    value: torch.Tensor
    gradient: torch.Tensor
    first: torch.Tensor
    first_scales: torch.Tensor
    second: torch.Tensor
    second_scales: torch.Tensor
    step: torch.Tensor
    num_rows: int
    length: int


def step_by_kernel(parameters, lr, **rule):
    moments = [tensor for each in parameters for tensor in each[2:6]]
    sizes = [number for each in parameters for number in (each.num_rows, each.length, 128)]
    rate, number = (lr, 0.0) if isinstance(lr, torch.Tensor) else (None, lr)
    values, gradients, steps = ([getattr(each, key) for each in parameters] for key in ("value", "gradient", "step"))
    coat_adamw_step(values, gradients, moments, steps, rate, sizes=sizes, lr=number, **rule)


def new_parameter(shape, dtype, device="cpu"):
    """After seven steps, with moments of several magnitudes."""
    value, gradient = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    moments = [*quantise(0.3 * torch.randn(shape)), *quantise(torch.randn(shape).exp(), keep_positive=True)]
    tensors = [each.to(device) for each in (value, gradient, *moments, torch.tensor(7.0))]
    return QuantisedParameter(*tensors, *shape)


def copies(parameters):
    return [QuantisedParameter(*(copy.deepcopy(each) for each in parameter)) for parameter in parameters]


def by_torch(parameters, **rule):
    """The reference: CoatAdamW without the kernel."""
    for each in parameters:
        parameter = nn.Parameter(each.value)
        optimizer = CoatAdamW([parameter], **rule)
        names = ("exp_avg", "exp_avg_scales", "exp_avg_sq", "exp_avg_sq_scales")
        optimizer.state[parameter] = dict(zip(names, each[2:6], strict=True)) | {"step": each.step - 1}
        parameter.grad = each.gradient
        optimizer.step()


@pytest.fixture
def by_rows(monkeypatch):
    """Groups within rows, also of parameters that the optimizer would cut as a whole."""
    layout = coat_adamw.layout_of_state

    def layout_of_rows(parameter):
        num_rows, length = parameter.shape
        return layout(parameter)._replace(
            num_rows=num_rows, length=length, size=min(length, 128), is_quantised=True, is_whole=False
        )

    monkeypatch.setattr(coat_adamw, "layout_of_state", layout_of_rows)


def exactly(parameter, lr, betas, eps, weight_decay):
    """Value and moments after the step, in float64."""
    gradient, step = parameter.gradient.double(), parameter.step.double()
    first = dequantise(parameter.first, parameter.first_scales).double() * betas[0] + (1 - betas[0]) * gradient
    second = dequantise(parameter.second, parameter.second_scales).double() * betas[1]
    second += (1 - betas[1]) * gradient.square()
    unbiased = first / (1 - betas[0] ** step), second / (1 - betas[1] ** step)
    value = parameter.value.double() * (1 - lr * weight_decay) - lr * unbiased[0] / (unbiased[1].sqrt() + eps)
    return value, first, second


def plain(parameter):
    """Value and moments as they are kept."""
    moments = [(parameter.first, parameter.first_scales), (parameter.second, parameter.second_scales)]
    return parameter.value, *(dequantise(*moment) for moment in moments)


def joined(results):
    """Of all parameters."""
    return [torch.cat([each.flatten() for each in parts]) for parts in zip(*results, strict=True)]


@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("dtypes", [("fp32", torch.float32), ("bf16", torch.bfloat16)], ids=str)
@pytest.mark.parametrize("settings", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_step(shapes, settings, dtypes, kernels):
    (name, dtype), rule = dtypes, RULE | settings
    before = [new_parameter(shape, dtype, kernels) for shape in shapes]
    found, expected = copies(before), copies(before)
    step_by_kernel(found, **rule)
    by_torch(expected, **rule)
    results = [map(plain, found), map(plain, expected), (exactly(p, **rule) for p in before)]
    for what, *three in zip((name, "fp32", "fp32"), *map(joined, results), strict=True):
        assert_as_exact(what, *three)
    for one, other in zip(found, expected, strict=True):
        for scales in ("first_scales", "second_scales"):
            (largest, inverse), (same_largest, same_inverse) = (
                getattr(each, scales).unbind(-1) for each in (one, other)
            )
            torch.testing.assert_close(largest, same_largest, rtol=1e-6, atol=0)
            # the smallest entry may be what was left when two cancelled
            torch.testing.assert_close(inverse, same_inverse, rtol=1e-3, atol=0)
        for key in ("first", "second"):  # neighbours, where a number lies between two codes
            distance = (getattr(one, key).int() - getattr(other, key).int()).abs()
            assert distance.numel() == 0 or distance.max() <= 1
            assert (distance > 0).sum() <= 1 + 0.01 * distance.numel()


NAN, INF = math.nan, math.inf
GRADIENTS = {
    "zeros": torch.zeros(2, 40),
    "equal": torch.full((2, 150), -3e-4),
    "one-entry": torch.eye(2, 140),
    "far-apart": torch.logspace(-18, 3, 256).view(2, 128),
    "not-finite": torch.tensor([[1.0, NAN, 0.5, INF, -INF, 0.0, -2.0, 3.0]] * 2),
    "tiny": torch.full((2, 9), 1e-22),
    "huge": torch.tensor([[1e15, -1e19, 1e30, -3e38, 1.0, 0.0]] * 2),
}


@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_special_entries_of_a_first_step(gradient, kernels):
    shape = gradient.shape
    moments = [each for _ in range(2) for each in quantise(torch.zeros(shape))]
    tensors = [torch.zeros(shape), gradient, *moments, torch.tensor(1.0)]
    before = [QuantisedParameter(*(each.to(kernels) for each in tensors), *shape)]
    found, expected = copies(before), copies(before)
    step_by_kernel(found, **RULE)
    by_torch(expected, **RULE)
    torch.testing.assert_close(found[0].value, expected[0].value, equal_nan=True)
    for key in ("first", "second"):
        decoded = [dequantise(getattr(p[0], key), getattr(p[0], f"{key}_scales")) for p in (found, expected)]
        torch.testing.assert_close(*decoded, rtol=0.15, atol=0, equal_nan=True)
        codes = [getattr(p[0], key) & 0x7F for p in (found, expected)]
        assert torch.equal(*[each == 0 for each in codes])
        assert torch.equal(*[each == 0x7F for each in codes])


def test_a_rate_on_the_device_is_read_there(kernels):
    before = [new_parameter((6, 130), torch.float32, kernels)]
    by_number, by_tensor = copies(before), copies(before)
    step_by_kernel(by_number, **RULE)
    step_by_kernel(by_tensor, **RULE | {"lr": torch.tensor(1e-2, device=kernels)})
    torch.testing.assert_close(by_tensor[0].value, by_number[0].value)


@pytest.mark.parametrize("rate", [1e-3, torch.tensor(1e-3)], ids=["number", "tensor"])
def test_the_optimizer_takes_it_where_it_is_switched_on(rate, served, calls):
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 6)).to(served)
    twin = copy.deepcopy(model)
    inputs = torch.randn(5, 40, device=served)
    for each, is_wanted in ((model, True), (twin, False)):
        use_kernels(is_wanted)
        optimizer = CoatAdamW(each.parameters(), lr=rate)
        versions = [parameter._version for parameter in each.parameters()]
        for _ in range(5):
            each(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(p._version > v for p, v in zip(each.parameters(), versions, strict=True))
    assert [name for name, _ in calls] == ["coat_adamw"] * 5
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_the_body_of_the_operator_steps_what_has_no_kernel(served, calls):
    results = []
    for wanted in (True, False):
        use_kernels(wanted)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 6)).to(served, torch.float64)
        optimizer = CoatAdamW(model.parameters(), lr=torch.tensor(1e-3))
        for _ in range(3):
            model(torch.ones(5, 40, device=served, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert not calls
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_opcheck(device):
    each = new_parameter((5, 40), torch.float32, device)
    arguments = ([each.value], [each.gradient], [*each[2:6]], [each.step], None)
    rule = RULE | {"betas": [*RULE["betas"]], "sizes": [5, 40, 40]}
    torch.library.opcheck(coat_adamw._coat_adamw, arguments, rule, test_utils=("test_schema", "test_faketensor"))


CONVERSIONS = """
#include "coat_adamw.cu"
int main() {
  for (int code = 0; code < 256; code++) {
    const float number = from_e4m3(code);
    fwrite(&number, 4, 1, stdout);
  }
  for (float number; fread(&number, 4, 1, stdin);) putchar(to_e4m3(number));
}
"""


@pytest.mark.skipif(find_gcc() is None, reason="g++ is not installed")
def test_e4m3_is_that_of_torch(tmp_path):
    """All codes, everything halfway between two of them, and neighbours of that."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    positive = codes[:127]
    halfway = (positive[1:] + positive[:-1]) / 2
    near = [torch.nextafter(halfway, torch.full_like(halfway, end)) for end in (-INF, INF)]
    numbers = torch.cat([positive, halfway, *near, torch.tensor([1e-30, NAN])])
    numbers = torch.cat([numbers, -numbers])
    (tmp_path / "program.cpp").write_text(CONVERSIONS)
    flags = ["-std=c++17", "-DHF_COMERA_EMULATED", f"-I{sources_folder()}"]
    subprocess.run([find_gcc(), *flags, tmp_path / "program.cpp", "-o", tmp_path / "program"], check=True)
    done = subprocess.run([tmp_path / "program"], input=numbers.numpy().tobytes(), capture_output=True, check=True)
    decoded = torch.frombuffer(bytearray(done.stdout[:1024]), dtype=torch.float32)
    torch.testing.assert_close(decoded, codes, rtol=0, atol=0, equal_nan=True)
    assert list(done.stdout[1024:]) == numbers.to(torch.float8_e4m3fn).view(torch.uint8).tolist()


def test_says_what_it_cannot_take():
    value, gradient, *state = new_parameter((6, 130), torch.float32)[:7]
    assert "not torch.float64" in coat_adamw_refusal([value.double()], [gradient], state)
    assert "one at a time" in coat_adamw_refusal([value], [gradient, gradient.bfloat16()], state)
    assert "not contiguous" in coat_adamw_refusal([value.t()], [gradient], state)
    assert "different devices" in coat_adamw_refusal([value], [gradient.to("meta")], state)
    assert coat_adamw_refusal([value], [gradient.t()], state) is None
