"""Step "fp8-linears" of the GPU report: linear layers in FP8 against bf16, alone and in the steps of a dense model."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.worker import Cases, Row
from benchmarks.harness.timing import check_agreement
from benchmarks.kernels.roofline import time_on
from benchmarks.speed.step import build_models, prepare_step, random_batch
from hf_comera import set_fp8_linears
from hf_comera.ops.fp8_linear import fp8_linear
from loop.measure import DENSE, time_interleaved

__all__ = ["run"]

BF16, FP8 = "bf16", "fp8"
TOLERANCE = 0.1
"""Of outputs: three bits of mantissa on both sides."""


def run(cases: Cases) -> None:
    """Layers, then a model."""
    for shape in cases.settings["shapes"]:
        cases.run("layer " + " x ".join(map(str, shape)), partial(measure_layer, tuple(shape), cases))
    for graphs in (False, True):
        name = "model, graphs" if graphs else "model, eager"
        cases.run(name, partial(measure_model, name, graphs, cases))


def measure_layer(shape: tuple[int, int, int], cases: Cases) -> list[Row]:
    """Forward and backward of one layer."""
    tokens, num_in, num_out = shape
    device, dtype = torch.device(cases.device), torch.bfloat16
    x = torch.randn(tokens, num_in, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(num_out, num_in, device=device, dtype=dtype).div_(num_in**0.5).requires_grad_()
    grad = torch.randn(tokens, num_out, device=device, dtype=dtype)

    def both_ways(layer: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(layer(x, weight), (x, weight), grad)[0]

    check_agreement("FP8 linear", fp8_linear(x, weight), torch.nn.functional.linear(x, weight), TOLERANCE)
    candidates = {
        BF16: lambda: both_ways(torch.nn.functional.linear), FP8: lambda: both_ways(fp8_linear),
    }  # fmt: skip
    timings = time_on(device, candidates, cases.settings["rounds"])
    us = {f"{name}_us": round(timings.median(name) * 1e6, 1) for name in candidates}
    return [{"what": f"layer {tokens} x {num_in} x {num_out}", **us, "ratio": round(timings.ratio(FP8, BF16), 2)}]


def measure_model(name: str, graphs: bool, cases: Cases) -> list[Row]:
    """Steps of the dense model, with layers in FP8 and without."""
    settings, device = cases.settings, torch.device(cases.device)
    torch.manual_seed(0)
    dense = build_models(settings["model"], dropout=0.0)[DENSE]
    models = {BF16: dense, FP8: copy.deepcopy(dense)}
    report = set_fp8_linears(models[FP8], min_features=settings["min_features"])
    batch = random_batch(settings["batch"], device, settings["model"])
    prepared = {key: prepare_step(model, "adamw", batch, dtype="bf16", graphs=graphs) for key, model in models.items()}
    timings = time_interleaved({key: ready.run for key, ready in prepared.items()}, settings["rounds"])
    us = {f"{key}_us": round(timings.median(key) * 1e6, 1) for key in prepared}
    peaks = {f"{key}_peak_bytes": ready.peak_bytes for key, ready in prepared.items()}
    ratio = round(timings.ratio(FP8, BF16), 2)
    return [{"what": name, **us, "ratio": ratio, **peaks, "fp8_layers": len(report.in_fp8)}]
