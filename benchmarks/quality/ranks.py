"""Train the byte-level GPT-2 of the quality benchmark with ranks kept, cut on the way, and small from the start.

    python -m benchmarks.quality.ranks

`--help` says what is compared.
"""

import argparse
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.harness.timing import RESULTS, positive_integer
from benchmarks.quality.tasks import Task, bytes_task, held_out_loss
from benchmarks.quality.training import LAST_PART, MAX_GRADIENT_NORM, rate_course
from hf_comera import (
    ComeraConfig,
    RankAdaptation,
    RankAdapter,
    TTMuon,
    add_rank_gates,
    get_comera_model,
    size_report,
)
from loop.launch import run_script
from loop.measure import MACHINE_IDENTITY, machine, replace_rows

DESCRIPTION = """\
Three runs with the same data and rate: a tensor-train model whose ranks are kept;
the same, cut by rank adaptation (its defaults) to the core parameters of a model
of smaller rank; that smaller model from the start. Printed are the mean training
loss of the last tenth of the steps, and the held-out loss. --only runs one of them,
--early and --late try other lengths of the stages of rank adaptation, --way other
ways to decide which ranks go.
"""
KEPT, CUT, SMALL = "kept", "cut", "small"
AS_IT_IS, NORM_ALONE = "as it is", "norm alone"
WAYS: dict[str, dict[str, float]] = {
    AS_IT_IS: {},
    NORM_ALONE: {},
    "no pressure": {"gamma": 0.0, "pressure": 0.0},
    "pressure times 10": {"gamma": 10 * RankAdaptation.gamma, "pressure": 10 * RankAdaptation.pressure},
}
"""How ranks are chosen, by the settings that differ from the defaults."""
IDENTITY = ["form", "way", "stages", "rank", "small_rank", "width", "steps", "lr", "seed"]
Row = dict[str, str | int | float]


class ByNormAlone(RankAdapter):
    """Cuts what is a small part of its layer, whatever the loss depends on that layer."""

    def before_step(self, loss: torch.Tensor) -> None:
        """As ever, but all bonds count alike."""
        super().before_step(loss)
        self.effects.fill_(1)


def main() -> None:
    """Train, print the table, write the rows."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.quality.ranks", description=DESCRIPTION, formatter_class=keep_lines
    )
    parser.add_argument("--rank", type=positive_integer, default=32, help="of the large model; default 32")
    parser.add_argument("--small_rank", type=positive_integer, default=16, help="of the small one; default 16")
    parser.add_argument("--width", type=positive_integer, default=256, help="hidden size; default 256")
    parser.add_argument("--steps", type=positive_integer, default=500, help="of each run; default 500")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate; default 2e-3")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a run each; default 0")
    for name in ("early", "late"):
        default = getattr(RankAdaptation, name)
        told = f"part of the steps that the {name} stage takes; default {default}"
        parser.add_argument(f"--{name}", type=float, default=default, help=told)
    parser.add_argument("--only", choices=(KEPT, CUT, SMALL), help="one of the three")
    parser.add_argument("--way", choices=WAYS, default=AS_IT_IS, help="to choose the ranks that go; default as it is")
    parser.add_argument("--threads", type=positive_integer, default=1, help="torch threads; default 1")
    parser.add_argument("--no-save", action="store_true", help="print only, do not write benchmarks/results/")
    args = parser.parse_args()
    # Refused here, before the first run: stages that no training has room for.
    RankAdaptation(early=args.early, late=args.late).stages(args.steps)
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    task, rows = bytes_task(), []
    for seed in args.seeds:
        for form in [args.only] if args.only else (KEPT, CUT, SMALL):
            rows.append(run(task, form, seed, args))
            if not args.no_save:
                replace_rows(RESULTS / "bench_ranks.csv", [rows[-1] | machine()], [*IDENTITY, *MACHINE_IDENTITY])
    show(rows)


def run(task: Task, form: str, seed: int, args: argparse.Namespace) -> Row:
    """One training; its row."""
    torch.manual_seed(seed)
    wanted = size_report(build(task, args.small_rank, args.width)).parameters
    torch.manual_seed(seed)
    model = build(task, args.small_rank if form == SMALL else args.rank, args.width)
    start = time.perf_counter()
    adaptation = None
    if form == CUT:
        adaptation = RankAdaptation(target_parameters=wanted, early=args.early, late=args.late, **WAYS[args.way])
    losses = train(task, model, seed, args, adaptation)
    seconds = time.perf_counter() - start
    last = losses[-max(1, int(LAST_PART * args.steps)) :]
    return {
        "form": form,
        "way": "" if adaptation is None or args.way == AS_IT_IS else args.way,
        "stages": "" if adaptation is None else f"{adaptation.early:g} early, {adaptation.late:g} late",
        "rank": args.rank,
        "small_rank": args.small_rank,
        "width": args.width,
        "steps": args.steps,
        "lr": args.lr,
        "seed": seed,
        "core_parameters": size_report(model).compressed_parameters,
        "training_loss": round(statistics.mean(last), 4),
        "held_out_loss": round(held_out_loss(task, model), 4),
        "seconds": round(seconds, 1),
    }


def build(task: Task, rank: int, width: int) -> PreTrainedModel:
    """The model with random weights."""
    settings = ComeraConfig(target_modules=task.target_modules, rank=rank)
    return get_comera_model(task.model_class, settings, config=task.build_config(width)).train()


def train(
    task: Task, model: PreTrainedModel, seed: int, args: argparse.Namespace, adaptation: RankAdaptation | None
) -> list[float]:
    """The loss of each step; with ``adaptation`` ranks are cut on the way."""
    if adaptation is not None:
        add_rank_gates(model)
    optimizer = TTMuon(model, args.lr)
    schedule = LambdaLR(optimizer, rate_course(args.steps))
    way = ByNormAlone if args.way == NORM_ALONE else RankAdapter
    adapter = None if adaptation is None else way(model, optimizer, adaptation, total_steps=args.steps)
    batches, losses = task.batches(seed), []
    for step in tqdm(range(args.steps), unit="step", leave=False):
        loss = task.loss(model, batches[step])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        losses.append(loss.item())
        if adapter is not None:
            adapter.before_step(loss)
        optimizer.step()
        if adapter is not None:
            adapter.after_step()
        schedule.step()
        optimizer.zero_grad()
    if adapter is not None:
        adapter.finish()
    return losses


def show(rows: list[Row]) -> None:
    """Print the figures; what all runs share is in the title."""
    shared = [name for name in IDENTITY if name not in ("form", "way", "stages", "seed")]
    about = ", ".join(f"{name.replace('_', ' ')} {rows[0][name]}" for name in shared)
    names = [name for name in rows[0] if name not in shared]
    headers = [name.replace("_", " ") for name in names]
    table = Table(*headers, title=f"Ranks kept, cut, and small from the start: {about}", title_justify="left")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run_script(main))
