"""Time what rank adaptation adds to a training step of the six-encoder BERT of the CoMERA paper, and one cut.

    python scripts/bench_adaptation.py

`--help` says what is compared.
"""

import statistics
import time
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BertForSequenceClassification, PreTrainedModel

from bench_step import LENGTH, SEQUENCES
from hf_comera import RankAdaptation, RankAdapter, TTMuon, add_rank_gates, get_comera_model, size_report
from interleaved_timing import MACHINE_IDENTITY, RESULTS, benchmark_parser, machine, replace_rows, time_interleaved
from six_encoders import paper_shapes, six_encoders

DESCRIPTION = """\
Forward, backward, TTMuon and zero_grad of the tensor-train model of bench_step.py,
as it is and with rank adaptation in its late stage, in turns; then the seconds of
one cut. "objective" is what stands beside the training step: importance, size
objective and proximal step, between two cuts; "gates" is the rest of what was
added, most of it the product of cores and gates, forward and backward.
"""
PLAIN, ADAPTED = "fixed ranks", "rank adaptation"
TOTAL_STEPS = 10_000


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
    batch = {
        "input_ids": torch.randint(30522, (SEQUENCES, LENGTH)),
        "attention_mask": torch.ones(SEQUENCES, LENGTH, dtype=torch.long),
        "labels": torch.randint(3, (SEQUENCES,)),
    }
    plain = build_model()
    adapted = AdaptedStep(build_model(), batch)
    candidates = {PLAIN: partial(plain_step, plain, TTMuon(plain, 1e-4), batch), ADAPTED: adapted}
    timings = time_interleaved(candidates, args.rounds, label="training step")
    step_s, objective_s = timings.median(PLAIN), statistics.median(adapted.objective_s)
    row = {
        "model": "bert-6x768",
        "tokens": f"{SEQUENCES}x{LENGTH}",
        "step_s": round(step_s, 4),
        "objective_s": round(objective_s, 5),
        "objective_share": round(objective_s / step_s, 5),
        "gates_and_objective_share": round(1 / timings.ratio(ADAPTED, PLAIN) - 1, 5),
        "cut_s": round(adapted.cut(), 3),
        "rounds": args.rounds,
    }
    show(row)
    if not args.no_save:
        replace_rows(RESULTS / "bench_adaptation.csv", [row | machine()], ["model", "tokens", *MACHINE_IDENTITY])


def build_model() -> PreTrainedModel:
    """The paper's model, in training mode."""
    return get_comera_model(BertForSequenceClassification, paper_shapes(), config=six_encoders()).train()


def plain_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    """One step at fixed ranks."""
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def show(row: dict[str, str | int | float]) -> None:
    """Print the figures."""
    table = Table(show_header=False, title="Rank adaptation of BERT with six layers", title_justify="left")
    for name, value in row.items():
        table.add_row(name.replace("_", " "), f"{value:.2%}" if name.endswith("share") else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
