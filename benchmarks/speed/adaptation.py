"""Time what rank adaptation adds to a training step of the six-encoder BERT of the CoMERA paper, and what a cut saves.

    python -m benchmarks.speed.adaptation

`--help` says what is compared.
"""

import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BertForSequenceClassification, PreTrainedModel

from benchmarks.harness.timing import RESULTS, benchmark_parser
from benchmarks.speed.step import random_batch
from hf_comera import RankAdaptation, RankAdapter, TTMuon, add_rank_gates, get_comera_model, size_report
from loop.measure import MACHINE_IDENTITY, machine, replace_rows, time_interleaved
from mnli.model import paper_shapes, six_encoders

DESCRIPTION = """\
Forward, backward, TTMuon and zero_grad of the tensor-train model of benchmarks/speed/step.py,
as it is and with rank adaptation in its late stage, in turns; then one cut, to half
of the core parameters, and the step as it is and after the cut, in turns.
"objective" is what stands beside the training step: importance, size
objective and proximal step, between two cuts; "gates" is the rest of what was
added, most of it the product of cores and gates, forward and backward; "optimizer"
is TTMuon's part of a step, with equal ranks and with the other ranks of each layer
that the cut leaves. "cut step ratio" is how many times as fast the step is after it.
"""
PLAIN, ADAPTED, CUT = "fixed ranks", "rank adaptation", "after the cut"
TOTAL_STEPS = 10_000
TOKENS = "32x128"


class PlainStep:
    """A training step at fixed ranks."""

    def __init__(
        self, model: PreTrainedModel, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.model, self.batch = model, batch
        self.optimizer = TTMuon(model, 1e-4) if optimizer is None else optimizer
        self.optimizer_s: list[float] = []

    def __call__(self) -> None:
        """One step."""
        self.model(**self.batch).loss.backward()
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer_s.append(time.perf_counter() - start)
        self.optimizer.zero_grad()


class AdaptedStep:
    """A training step with rank adaptation, in the late stage but between two cuts."""

    def __init__(self, model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
        report = size_report(model)
        wanted = int(report.parameters - 0.5 * report.compressed_parameters)
        add_rank_gates(model)
        self.model, self.batch, self.optimizer = model, batch, TTMuon(model, 1e-4)
        settings = RankAdaptation(target_parameters=wanted, early=1, late=TOTAL_STEPS - 1, cut_every=TOTAL_STEPS)
        self.adapter = RankAdapter(model, self.optimizer, settings, total_steps=TOTAL_STEPS)
        self.objective_s: list[float] = []

    def __call__(self) -> None:
        """One step."""
        loss = self.model(**self.batch).loss
        loss.backward()
        start = time.perf_counter()
        self.adapter.before_step(loss)
        seconds = time.perf_counter() - start
        self.optimizer.step()
        start = time.perf_counter()
        self.adapter.after_step()
        self.objective_s.append(seconds + time.perf_counter() - start)
        self.optimizer.zero_grad()

    def cut(self) -> float:
        """Seconds of the cut that training would end with."""
        start = time.perf_counter()
        self.adapter.finish()
        return time.perf_counter() - start


def main() -> None:
    """Measure, print the table, write the row."""
    args = benchmark_parser(DESCRIPTION, rounds=15).parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    batch = random_batch(TOKENS, torch.device("cpu"))
    plain, adapted = PlainStep(build_model(), batch), AdaptedStep(build_model(), batch)
    timings = time_interleaved({PLAIN: plain, ADAPTED: adapted}, args.rounds, label="training step")
    step_s, objective_s = timings.median(PLAIN), statistics.median(adapted.objective_s)
    row = {
        "model": "bert-6x768",
        "tokens": TOKENS,
        "step_s": round(step_s, 4),
        "objective_s": round(objective_s, 5),
        "objective_share": round(objective_s / step_s, 5),
        "gates_and_objective_share": round(1 / timings.ratio(ADAPTED, PLAIN) - 1, 5),
        "cut_s": round(adapted.cut(), 3),
        **after_the_cut(plain, PlainStep(adapted.model, batch, adapted.optimizer), args.rounds),
        "rounds": args.rounds,
    }
    show(row)
    if not args.no_save:
        replace_rows(RESULTS / "bench_adaptation.csv", [row | machine()], ["model", "tokens", *MACHINE_IDENTITY])


def build_model() -> PreTrainedModel:
    """The paper's model, in training mode."""
    return get_comera_model(BertForSequenceClassification, paper_shapes(), config=six_encoders()).train()


def after_the_cut(plain: PlainStep, cut: PlainStep, rounds: int) -> dict[str, str | int | float]:
    """The columns of the step at full and at cut ranks."""
    timings = time_interleaved({PLAIN: plain, CUT: cut}, rounds, label="training step after the cut")
    return {
        "core_parameters": size_report(plain.model).compressed_parameters,
        "cut_core_parameters": size_report(cut.model).compressed_parameters,
        "cut_step_ratio": round(timings.ratio(CUT, PLAIN), 3),
        "optimizer_s": round(statistics.median(plain.optimizer_s[-rounds:]), 4),
        "cut_optimizer_s": round(statistics.median(cut.optimizer_s[-rounds:]), 4),
    }


def show(row: dict[str, str | int | float]) -> None:
    """Print the figures."""
    table = Table(show_header=False, title="Rank adaptation of BERT with six layers", title_justify="left")
    for name, value in row.items():
        table.add_row(name.replace("_", " "), f"{value:.2%}" if name.endswith("share") else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
