"""Parts ``policies`` and ``models`` of the memory benchmark: bytes saved, peak and time of a step by policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness.timing import check_agreement
from benchmarks.memory.candidates import POLICIES, Candidate, Memory, Training, measure_apart
from benchmarks.memory.promises import SAVED_BYTES, SAVED_SHARE, STEP_SHARE, beside_bar
from loop.measure import DENSE, TENSOR_TRAIN, Timings, time_interleaved

__all__ = ["GROUPS", "Group", "measure_group", "show_policies"]

Row = dict[str, str | int | float]
EXACT = 1e-4
"""Largest relative error of the gradient under a policy without FP8."""
KEEP = "keep"
DENSE_POLICIES = (KEEP, "rank", "fp8")
TENSOR_TRAIN_POLICIES = tuple(policy for policy in POLICIES if policy != "fp8")


@dataclass(frozen=True, kw_only=True)
class Group:
    """What takes turns: one model with one dropout, in both forms, under all policies."""

    model: str
    sequences: int
    dropout: float

    def candidates(self) -> list[Candidate]:
        """Keep first in either form."""
        pairs = [(TENSOR_TRAIN, policy) for policy in TENSOR_TRAIN_POLICIES]
        pairs += [(DENSE, policy) for policy in DENSE_POLICIES]
        shared = {"model": self.model, "sequences": self.sequences, "dropout": self.dropout}
        return [Candidate(form=form, policy=policy, **shared) for form, policy in pairs]


GROUPS = {
    ("policies", "full"): [Group(model="bert-6x768", sequences=32, dropout=dropout) for dropout in (0.0, 0.1)],
    ("policies", "tiny"): [Group(model="bert-tiny", sequences=8, dropout=0.1)],
    ("models", "full"): [Group(model=name, sequences=1, dropout=0.0) for name in ("gpt2-24x1024", "llama-8x1024")],
    ("models", "tiny"): [Group(model="llama-tiny", sequences=1, dropout=0.0)],
}
"""By part and sizes."""


def measure_group(group: Group, device: str, threads: int, rounds: int) -> list[Row]:
    """A row for each candidate."""
    candidates = group.candidates()
    label = f"memory, {group.model}, dropout {group.dropout:g}"
    with tqdm(candidates, desc=label, unit="process", leave=False) as progress:
        memories = [measure_apart(candidate, device, threads) for candidate in progress]
    errors, timings = _time(candidates, torch.device(device), rounds)
    kept = {one.form: memory for one, memory in zip(candidates, memories, strict=True) if one.policy == KEEP}
    return [
        candidate.case()
        | _memory_columns(memory, kept[candidate.form])
        | _time_columns(candidate, timings)
        | {"gradient_error": float(f"{errors[_name(candidate)]:.2g}")}
        for candidate, memory in zip(candidates, memories, strict=True)
    ]


def _time(candidates: Sequence[Candidate], device: torch.device, rounds: int) -> tuple[dict[str, float], Timings]:
    """The error of each gradient, and the seconds of forward and backward; policies of a form share its model."""
    trainings: dict[str, Training] = {}
    errors: dict[str, float] = {}
    models, exact = {}, {}
    for candidate in tqdm(candidates, desc=f"gradients, {candidates[0].model}", unit="run", leave=False):
        training = Training(candidate, device, models.get(candidate.form))
        models[candidate.form] = training.model
        trainings[_name(candidate)] = training
        gradient = training.gradient()
        if candidate.policy == KEEP:
            exact[candidate.form] = gradient
        elif "fp8" not in candidate.policy:
            check_agreement(f"gradients of {_name(candidate)} and {KEEP}", gradient, exact[candidate.form], EXACT)
        errors[_name(candidate)] = _relative_error(gradient, exact[candidate.form])
    steps = {name: training.step for name, training in trainings.items()}
    label = f"seconds, {candidates[0].model}, dropout {candidates[0].dropout:g}"
    return errors, time_interleaved(steps, rounds, warmup=1, label=label)


def _name(candidate: Candidate) -> str:
    return f"{candidate.form}, {candidate.policy}"


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def _memory_columns(memory: Memory, kept: Memory) -> Row:
    return {
        "saved_bytes": memory.saved,
        "saved_of_keep": round(memory.saved / kept.saved, 3),
        "peak_bytes": "" if memory.growth is None else memory.growth,
        "peak_by": memory.measured_by,
    }


def _time_columns(candidate: Candidate, timings: Timings) -> Row:
    name, kept = _name(candidate), f"{candidate.form}, {KEEP}"
    return {
        "step_s": round(timings.median(name), 4),
        "step_of_keep": round(timings.ratio(kept, name), 3),  # how many times faster it is to keep
        "rounds": len(timings.seconds[name]),
    }


def show_policies(rows: Sequence[Mapping[str, str | int | float]], console: Console) -> None:
    """Print the figures of one group beside the bars."""
    first = rows[0]
    case = f"{first['model']}, {first['tokens']} tokens, dropout {first['dropout']:g}"
    table = Table("form", "policy", title=f"What autograd keeps: {case}", title_justify="left")
    for heading in ("saved MB", "of keep", "peak MB", "step s", "of keep", "gradient error"):
        table.add_column(heading, justify="right")
    for row in rows:
        kind, peak = (row["model"], row["form"], row["policy"]), row["peak_bytes"]
        saved_bar, share_bar = SAVED_BYTES.get((*kind, row["dropout"])), SAVED_SHARE.get(kind)
        table.add_row(
            row["form"],
            row["policy"],
            beside_bar(saved_bar, row["saved_bytes"], f"{row['saved_bytes'] / 1e6:,.1f}", unit=1e6),
            beside_bar(share_bar, row["saved_of_keep"], f"{row['saved_of_keep']:.2f}"),
            "-" if peak == "" else f"{peak / 1e6:,.1f}",
            f"{row['step_s']:.3f}",
            beside_bar(STEP_SHARE.get(kind), row["step_of_keep"], f"{row['step_of_keep']:.2f}"),
            f"{row['gradient_error']:.1g}",
        )
    console.print(table)
    console.print(
        "saved: kept from forward to backward. peak: the most that forward and backward add to what was in memory "
        "before, gradients included. step: forward and backward, medians; shares of it are taken within a round."
    )
