"""``hf-comera estimate``: memory and speed before training, the face of ``estimate_memory`` and ``predict_speed``."""

import dataclasses
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_comera.cli.layer_table import short_count
from hf_comera.cli.options import (
    AsJson,
    Autocast,
    Batch,
    ClassName,
    EmbeddingWidth,
    Exclude,
    Model,
    NumFactors,
    Rank,
    RankPattern,
    Target,
    autocast_dtype,
    batch_sizes,
    print_json,
    settings_of,
    skeleton_of,
)
from hf_comera.compress.prediction import MachineRates, StepPrediction, predict_speed
from hf_comera.hub.source import find_model
from hf_comera.memory import ActivationPolicy, MemoryEstimate, estimate_memory
from hf_comera.memory.policy import NAMED_POLICIES

__all__ = ["estimate_command"]

DENSE, COMPRESSED = "dense", "tensor train"
OF_MACHINE = "Another machine"

SHOWN_POLICIES = ("none", "rank", "rank+fp8")
"""Of the compressed model; the others lie between them."""


def estimate_command(
    context: typer.Context,
    model: Model,
    *,
    batch: Batch = "8x128",
    rank: Rank = None,
    num_factors: NumFactors = None,
    embedding_width: EmbeddingWidth = None,
    target: Target = None,
    exclude: Exclude = None,
    rank_of: RankPattern = None,
    class_name: ClassName = None,
    autocast: Autocast = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="10^12 operations of matrix products in a second.", rich_help_panel=OF_MACHINE, min=0.001),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(help="10^9 bytes of memory in a second.", rich_help_panel=OF_MACHINE, min=0.1),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory and time of a training step, dense and compressed. Nothing is trained, no weights are read.

    Memory is counted on a step with tensors that have sizes but no entries, for each activation policy, with AdamW.
    Time is predicted from the operations and bytes of that step, at the rates of this machine, which are measured in
    a second, or at those of another one. The ratio is more certain than the times.

    Example: hf-comera estimate FacebookAI/roberta-base --batch 32x128 --rank 30

    Example, for an H100 in bf16: hf-comera estimate my-model --autocast bf16 --tflops 400 --bandwidth 3000
    """
    source, settings = find_model(model, class_name), settings_of(context)
    sizes: dict[str, Any] = dict(zip(("batch_size", "seq_len"), batch_sizes(batch), strict=True))
    sizes["autocast"] = autocast_dtype(autocast)
    models = {DENSE: source.dense_skeleton(), COMPRESSED: skeleton_of(source, settings)}
    rates = _rates(tflops, bandwidth) or MachineRates.measure("cpu", sizes["autocast"] or models[DENSE].dtype)
    memory, speed = _predicted(models, rates, sizes)
    if as_json:
        print_json(_as_json(model, models, batch, memory, speed))
        return
    console = Console(highlight=False)
    console.print(_memory_table(memory, batch), "", _speed_table(speed, batch))
    console.print(_origin(rates, "given" if tflops else "measured here now"), markup=False)


def _rates(tflops: float | None, bandwidth: float | None) -> MachineRates | None:
    """Of another machine, if one was described."""
    if (tflops is None) != (bandwidth is None):
        raise ValueError("--tflops and --bandwidth describe one machine: give both, as --tflops 60 --bandwidth 3000.")
    return MachineRates(flops=tflops * 1e12, bytes=bandwidth * 1e9) if tflops and bandwidth else None


def _predicted(
    models: dict[str, PreTrainedModel], rates: MachineRates, sizes: dict[str, Any]
) -> tuple[dict[str, MemoryEstimate], dict[str, StepPrediction]]:
    """Memory of both models, of the compressed one with every policy, and the time of their steps without one."""
    named: dict[str, ActivationPolicy | None] = {"none": None, **NAMED_POLICIES}
    policies = {DENSE: {"none": named["none"]}, COMPRESSED: {name: named[name] for name in SHOWN_POLICIES}}
    memory, speed = {}, {}
    for name, model in tqdm(models.items(), "steps without entries", leave=False):
        memory[name] = estimate_memory(model, policies=policies[name], **sizes)
        speed[name] = predict_speed(model, rates=rates, **sizes)
    return memory, speed


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def _memory_table(memory: dict[str, MemoryEstimate], batch: str) -> Table:
    table = _table(f"Memory of a training step, predicted, {batch}")
    for heading in ("model", "activation policy", "weights", "gradients", "optimizer", "activations", "peak"):
        table.add_column(heading, justify="left" if heading in ("model", "activation policy") else "right")
    for name, estimate in memory.items():
        for policy, found in estimate.policies.items():
            parts = estimate.weights, estimate.gradients, estimate.optimizer, found.activations, found.peak
            table.add_row(name, policy, *(f"{short_count(part)}B" for part in parts))
    return table


def _speed_table(speed: dict[str, StepPrediction], batch: str) -> Table:
    table = _table(f"Time of a training step, predicted, {batch}")
    for heading in ("model", "operations", "bytes moved", "time", "times faster"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, found in speed.items():
        ratio = "" if name == DENSE else f"{speed[DENSE].seconds / found.seconds:.1f}"
        table.add_row(
            name, f"{short_count(found.flops)}FLOP", f"{short_count(found.bytes)}B", f"{found.seconds:.3g} s", ratio
        )
    return table


def _origin(rates: MachineRates, source: str) -> str:
    return (
        f"Predicted from counted operations at {short_count(rates.flops)}FLOP/s and {short_count(rates.bytes)}B/s "
        f"({source}), each at the slower of its two limits. Not timed. Every token has a label."
    )


def _as_json(
    model: str,
    models: dict[str, PreTrainedModel],
    batch: str,
    memory: dict[str, MemoryEstimate],
    speed: dict[str, StepPrediction],
) -> dict[str, Any]:
    keys = {DENSE: "dense", COMPRESSED: "compressed"}
    return {
        "model": model,
        "class": type(models[DENSE]).__name__,
        "batch": batch,
        "memory_bytes": {keys[name]: dataclasses.asdict(found) for name, found in memory.items()},
        "predicted_step": {keys[name]: dataclasses.asdict(found) for name, found in speed.items()},
        "predicted_speedup": round(speed[DENSE].seconds / speed[COMPRESSED].seconds, 4),
    }
