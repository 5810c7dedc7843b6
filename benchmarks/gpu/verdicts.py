"""From the figures of the GPU report to verdicts: what to switch on by default, and what lost. The rules are data."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.plan import STEPS

__all__ = ["RULES", "Rule", "Verdict", "judge"]

FASTER, EVEN = 1.05, 0.95
"""A default is changed for 5 % at least; what is 5 % slower has lost. Between the two is noise."""
ON, SOMETIMES, EQUAL, LOST = "switch on by default", "switch on where it wins", "no gain: leave as it is", "lost"
WRONG, OPEN = "repair first", "not measured"
Row = dict[str, Any]


class Gain(NamedTuple):
    """One measured case of a rule."""

    what: str
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is judged, from which rows, and which tests must have passed for it."""

    subject: str
    gains: Callable[[list[Row]], list[Gain]]
    tests: tuple[str, ...] = ()
    """Words in the names of tests and cases; one that failed makes the subject wrong."""
    by_kernels: bool = False
    """Findings of compute-sanitizer in our kernels make it wrong, too."""


class Verdict(NamedTuple):
    """One line of the page."""

    subject: str
    verdict: str
    why: str


def of_op(*ops: str) -> Callable[[list[Row]], list[Gain]]:
    """Our kernel against plain torch, in rows of benchmarks/kernels/run.py."""

    def gains(rows: list[Row]) -> list[Gain]:
        chosen = [row for row in rows if row.get("op") in ops and "ratio_to_torch" in row]
        keys = ("format", "layers", "tokens", "in", "out", "rank")
        return [
            Gain(" ".join(f"{key} {row[key]}" for key in keys if key in row), float(row["ratio_to_torch"]))
            for row in chosen
        ]

    return gains


def between(treatment: str, base: str, form: str = "tensor_train") -> Callable[[list[Row]], list[Gain]]:
    """One treatment of a training step against another, for the same form."""

    def gains(rows: list[Row]) -> list[Gain]:
        times = {(row["step"], row["treatment"]): row for row in rows if f"{form}_step_ms" in row}
        steps = [step.name for step in STEPS if (step.name, base) in times and (step.name, treatment) in times]
        column = f"{form}_step_ms"
        return [Gain(step, times[step, base][column] / times[step, treatment][column]) for step in steps]

    return gains


def against_dense(treatment: str) -> Callable[[list[Row]], list[Gain]]:
    """The tensor train against the dense model under the same treatment."""
    return lambda rows: [Gain(row["step"], row["ratio"]) for row in rows if row.get("treatment") == treatment]


def best_against_best(rows: list[Row]) -> list[Gain]:
    """Each form as fast as any treatment makes it."""
    found = []
    for step in STEPS:
        times = [row for row in rows if row["step"] == step.name and "dense_step_ms" in row and not row.get("padded")]
        if times:
            dense, ours = (min(row[f"{form}_step_ms"] for row in times) for form in ("dense", "tensor_train"))
            found.append(Gain(step.name, dense / ours))
    return found


def fp8(rows: list[Row]) -> list[Gain]:
    """Dense linear layers in FP8 against bf16."""
    return [Gain(row["what"], row["ratio"]) for row in rows if "bf16_us" in row]


RULES = (
    Rule(subject="kernel: low-rank linear", gains=of_op("forward", "backward"), tests=("low_rank_linear",),
         by_kernels=True),
    Rule(subject="kernel: hidden layers (tiled_mlp)", gains=of_op("ffn forward", "ffn backward"), tests=("wide_",),
         by_kernels=True),
    Rule(subject="kernel: halves", gains=of_op("halves", "halves and gradients"), tests=("halves",), by_kernels=True),
    Rule(subject="kernel: embedding lookup", gains=of_op("lookup", "lookup and gradients"), tests=("ttm_",),
         by_kernels=True),
    Rule(subject="kernel: CoatAdamW", gains=of_op("coat adamw"), tests=("coat_adamw",), by_kernels=True),
    Rule(subject="kernels in plain steps", gains=between("kernels", "eager"), tests=("test_models", ", kernels"),
         by_kernels=True),
    Rule(subject="kernels in CUDA graphs", gains=between("graphs and kernels", "graphs"),
         tests=("test_models", "test_cuda_graph", "graphs and kernels"), by_kernels=True),
    Rule(subject="CUDA graphs (GraphedStep), tensor train", gains=between("graphs", "eager"),
         tests=("graphed_step", "cuda_capture", ", graphs")),
    Rule(subject="CUDA graphs (GraphedStep), dense", gains=between("graphs", "eager", "dense")),
    Rule(subject="torch.compile, tensor train", gains=between("compiled", "eager")),
    Rule(subject="torch.compile, dense", gains=between("compiled", "eager", "dense")),
    Rule(subject="torch.compile in CUDA graphs, tensor train", gains=between("compiled and graphs", "graphs")),
    Rule(subject="FP8 linears of a dense model", gains=fp8, tests=("fp8",)),
    Rule(subject="tensor train against dense, plain", gains=against_dense("eager")),
    Rule(subject="tensor train against dense, CUDA graphs", gains=against_dense("graphs")),
    Rule(subject="tensor train against dense, compiled", gains=against_dense("compiled")),
    Rule(subject="tensor train with kernels in graphs against dense in graphs",
         gains=against_dense("graphs and kernels")),
    Rule(subject="the same, rows of half to full length", gains=against_dense("graphs and kernels, padded")),
    Rule(subject="the same, AdamW for both", gains=against_dense("graphs and kernels, AdamW")),
    Rule(subject="tensor train at its best against dense at its best", gains=best_against_best),
)  # fmt: skip


def judge(journal: Journal, rules: Sequence[Rule] = RULES) -> list[Verdict]:
    """A verdict for each rule."""
    rows = journal.rows()
    findings = sum(row["ours"] for row in rows if "tool" in row)
    bad = [
        f"{step.name}: {case}"
        for step in STEPS
        for case, event in journal.outcomes(step.name).items()
        if event["outcome"] in ("failed", "died")
    ]
    return [_verdict(rule, rows, findings, bad) for rule in rules]


def _verdict(rule: Rule, rows: list[Row], findings: int, bad: list[str]) -> Verdict:
    wrong = [case for case in bad if any(word in case for word in rule.tests)]
    gains = rule.gains(rows)
    speed = _speed(gains)
    if wrong:
        return Verdict(rule.subject, WRONG, f"{len(wrong)} failed, first {wrong[0]}; {speed}")
    if rule.by_kernels and findings:
        return Verdict(rule.subject, WRONG, f"compute-sanitizer found {findings} faults in our kernels; {speed}")
    if not gains:
        return Verdict(rule.subject, OPEN, "")
    middle, least = statistics.median(gain.ratio for gain in gains), min(gain.ratio for gain in gains)
    if middle >= FASTER:
        return Verdict(rule.subject, ON if least >= EVEN else SOMETIMES, speed)
    most = max(gain.ratio for gain in gains)
    if most >= FASTER:
        return Verdict(rule.subject, SOMETIMES, speed)
    return Verdict(rule.subject, EQUAL if middle >= EVEN else LOST, speed)


def _speed(gains: list[Gain]) -> str:
    """Times faster: the median, and the cases at both ends."""
    if not gains:
        return OPEN
    low, high = min(gains, key=lambda gain: gain.ratio), max(gains, key=lambda gain: gain.ratio)
    middle = statistics.median(gain.ratio for gain in gains)
    return f"{middle:.2f} times ({len(gains)} cases; {low.ratio:.2f} {low.what} to {high.ratio:.2f} {high.what})"
