"""Steps "kernels-..." of the GPU report: the cases of benchmarks/kernels/run.py, each on its own."""

from functools import partial

import torch

from benchmarks.gpu.worker import Cases, Row
from benchmarks.kernels.roofline import Ceilings, measure_ceilings
from benchmarks.kernels.run import cases as kernel_cases
from benchmarks.kernels.run import measure_case
from hf_comera.ops import use_kernels
from hf_comera.ops.cuda.dispatch import serve_devices
from hf_comera.ops.cuda.library import emulated_kernels, kernels_refusal
from loop.measure import machine

__all__ = ["run"]


def run(cases: Cases) -> None:
    """All cases of the step; a case where kernel and plain torch disagree has failed, and the others go on."""
    device, rounds = torch.device(cases.device, None if cases.rehearsal else 0), cases.settings["rounds"]
    use_kernels(False)  # plain torch is what they are compared with
    serve_devices(device.type)
    if cases.rehearsal:
        emulated_kernels()
    elif reason := kernels_refusal(device):
        raise SystemExit(reason)
    torch.manual_seed(0)
    ceilings = measure_ceilings(device, rounds, size=64 if cases.rehearsal else 8192)
    cases.run("ceilings", lambda: [{"op": "ceilings", **rates(ceilings)}])
    for name in cases.settings["formats"]:
        for case, make, shape in kernel_cases(name, cases.rehearsal):
            words = " ".join(f"{key} {value}" for key, value in case.items())
            cases.run(words, partial(measure, case, make, shape, device, ceilings, rounds))


def measure(*arguments: object) -> list[Row]:
    """One row, as in the results file."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return [measure_case(*arguments) | machine() | {"gpu": gpu}]  # type: ignore[arg-type]


def rates(ceilings: Ceilings) -> Row:
    """The fastest that the device was seen to be."""
    flops = {f"{name}_tflops": round(rate / 1e12, 1) for name, rate in ceilings.flops_per_s.items()}
    return {"terabytes_per_s": round(ceilings.bytes_per_s / 1e12, 2), **flops}
