"""Steps "step-..." and "decoder-block" of the GPU report: training steps under each treatment of both forms."""

import gc
import sys
from argparse import Namespace
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.worker import Cases, Row
from benchmarks.speed import step as speed_step
from benchmarks.speed.step import Step, build_models, make_optimizer
from hf_comera.ops import use_kernels
from loop.measure import TENSOR_TRAIN, machine

__all__ = ["run"]

PROFILED_STEPS, PROFILED_LINES = 3, 25
ADAMW = "graphs and kernels, AdamW"
"""The last treatment: the optimizer of the dense model for both."""


def run(cases: Cases) -> None:
    """All treatments of a model; a tensor train alone takes our kernels, the rest is done to both forms."""
    settings = cases.settings
    if cases.rehearsal:
        speed_step.in_own_process = lambda *_: None  # type: ignore[assignment]
    torch.manual_seed(0)
    models = build_models(settings["model"], settings["dropout"])
    for treatment in (*settings["treatments"], ADAMW):
        cases.run(treatment, partial(measure, models, treatment, cases))
    cases.run("profile", partial(profile, models[TENSOR_TRAIN], cases))


def arguments(treatment: str, cases: Cases) -> Namespace:
    """What the command line of benchmarks/speed/step.py would have said; rows name it as their command."""
    switches = {
        "graphs": "graphs" in treatment, "kernels": "kernels" in treatment, "compile": "compiled" in treatment,
        "padded": "padded" in treatment,
    }  # fmt: skip
    values = {name: cases.settings[name] for name in ("model", "batch", "dtype", "dropout", "rounds")}
    values |= {"device": cases.device, "optimizer": "adamw" if treatment == ADAMW else "tt_muon"}
    sys.argv = [speed_step.__file__]
    args = speed_step.parse_arguments()  # all other options as they are by default
    vars(args).update({**values, **switches, "threads": torch.get_num_threads()})
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    sys.argv += words + [f"--{name}" for name, wanted in switches.items() if wanted]
    return args


def measure(models: dict[str, PreTrainedModel], treatment: str, cases: Cases) -> list[Row]:
    """One row, as in the results file, and milliseconds of both forms under one name."""
    args = arguments(treatment, cases)
    use_kernels(args.kernels)
    try:
        comparison = speed_step.compare(models, args)
    finally:
        use_kernels(False)
        clear(models)
    named = {form.replace(" ", "_"): comparison.timings.median(form) * 1e3 for form in models}
    step_ms = {f"{form}_step_ms": round(value, 3) for form, value in named.items()}
    return [{"treatment": treatment, **step_ms, **comparison.row(), **machine()}]


def clear(models: dict[str, PreTrainedModel]) -> None:
    """Leave nothing on the device of what a treatment put there."""
    for model in models.values():
        model.to("cpu")
        model.zero_grad(set_to_none=True)
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def profile(model: PreTrainedModel, cases: Cases) -> list[Row]:
    """Where the time of plain steps with kernels goes, by kernel of the device; the table is in the log."""
    device = torch.device(cases.device)
    batch = speed_step.random_batch(cases.settings["batch"], device, cases.settings["model"])
    model.to(device).train()
    step = Step(model, make_optimizer(model, "tt_muon"), batch, cases.settings["dtype"])
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    use_kernels(True)
    try:
        step()
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PROFILED_STEPS):
                step()
    finally:
        use_kernels(False)
        clear({TENSOR_TRAIN: model})
    events = profiler.key_averages()
    order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(events.table(sort_by=order, row_limit=PROFILED_LINES, max_name_column_width=90))
    longest = sorted(events, key=lambda event: getattr(event, order), reverse=True)[:PROFILED_LINES]
    return [
        {"treatment": "profile", "kernel": event.key[:120], "calls_a_step": event.count / PROFILED_STEPS,
         "us_a_step": round(getattr(event, order) / PROFILED_STEPS, 1)}
        for event in longest
    ]  # fmt: skip
