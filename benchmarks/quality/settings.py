"""The command line of the quality benchmark: what each option means, and what cannot work."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.timing import RESULTS, positive_integer
from benchmarks.quality.grid import BYTES, FORMS, SECONDS, STEPS
from benchmarks.quality.training import UPDATES

TASKS = ("bytes", "code", "nli")
DEFAULT_STEPS = {"bytes": 250, "code": 1000}
DEFAULT_EPOCHS = 5  # of task nli
FILES = ("code_file", "nli_file", "tokenizer", "results_dir")
DESCRIPTION = """\
How well does a tensor-train (tt) model learn, against a dense one? Trains from
random weights on real data and writes down losses, sizes and seconds.

  bytes  GPT-2 with three layers on the bytes of standard library modules;
         compressed: attention and FFN (the embedding has only 256 rows).
  code   the demo's RoBERTa, masked language modelling on Python functions;
         compressed: the library's defaults, the tied embedding included.
  nli    BERT with four layers on sentence pairs; compressed: the library's
         defaults. Reports the accuracy on the test fold as well.

Every combination of the lists is one run. A run whose row is in the results is
skipped, so the same command goes on where it was stopped; the run that was
interrupted starts over. Start the command twice to use two processes: each
takes runs that the other does not have, and both write to the same files.
To measure a run again, delete its row.
"""
HOW_TO_READ = f"""\
How to read the figures: the training loss is the mean over the last tenth of
the steps, the held-out loss is measured in evaluation mode on a fixed sample,
the same for all runs and seeds. A step is forward, backward, clipping and
optimizer; held-out measurements and the making of batches are not timed.
Training bytes are weights, gradients and optimizer state. The rate rises over
a tenth of the steps (at most 200) and falls to 0; --lrs is the rate of what is
compressed, or would be, and --other_lr that of all else.

Budgets: "{STEPS}" as many steps as said; "{SECONDS}" (--like_seconds_of)
the steps that take as long as the dense model's under AdamW, measured in turns;
"{BYTES}" (--like_bytes_of) a dense model so narrow that it trains within
the bytes of its tensor-train counterpart. Both keep the rows of the ordinary runs.
"""


def parse_settings(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        ValueError: If a file is not given or not there, or settings contradict each other.
    """
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.quality.run", description=DESCRIPTION, epilog=HOW_TO_READ, formatter_class=keep_lines
    )
    parser.add_argument("task", nargs="?", choices=TASKS, default="bytes", help="before the options; default bytes")
    _add_data(parser.add_argument_group("data and length"))
    _add_grid(parser.add_argument_group("what is compared (lists: every combination is a run)"))
    _add_budgets(parser.add_argument_group("budgets, threads and results"))
    arguments = parser.parse_args(argv)
    _check(arguments)
    return arguments


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--code_file",
        help="task code: parquet, json or jsonl with the columns code and docstring, and perhaps split; "
        "default: functions of the standard library, as in the demo",
    )
    group.add_argument(
        "--nli_file",
        help="task nli: parquet with the columns premise, hypothesis, label and fold (train, valid, test)",
    )
    group.add_argument("--tokenizer", help="task nli: folder of a BERT tokenizer, e.g. that of bert-base-uncased")
    defaults = ", ".join(f"{task} {steps}" for task, steps in DEFAULT_STEPS.items())
    group.add_argument(
        "--steps", type=positive_integer, help=f"default: {defaults}, nli as many as {DEFAULT_EPOCHS} epochs have"
    )
    group.add_argument("--epochs", type=positive_float, help="instead of --steps, for tasks code and nli")


def _add_grid(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--forms", "--form", nargs="+", choices=FORMS, default=list(FORMS), help="default: both")
    group.add_argument(
        "--ranks",
        "--rank",
        nargs="+",
        type=rank,
        default=["30"],
        help="largest tensor-train ranks; full: ranks that do not limit; default 30",
    )
    group.add_argument(
        "--updates",
        "--update",
        nargs="+",
        choices=UPDATES,
        default=["adamw", "muon"],
        help="adamw, or muon: TTMuon for tt, torch's Muon with the same bound for dense; default both",
    )
    group.add_argument("--lrs", "--lr", nargs="+", type=positive_float, default=[1e-3, 3e-3], help="default 1e-3 3e-3")
    group.add_argument("--seeds", "--seed", nargs="+", type=int, default=[0], help="weights and batches; default 0")
    group.add_argument(
        "--widths", "--width", nargs="+", type=positive_integer, default=[256], help="hidden sizes; default 256"
    )
    group.add_argument("--num_factors", type=positive_integer, default=3, help="factors a side; default 3")
    group.add_argument(
        "--other_lr", type=positive_float, default=1e-3, help="AdamW's rate of what is not compressed; default 1e-3"
    )


def _add_budgets(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--like_seconds_of",
        choices=("dense",),
        help="give each tt run as many steps as take the time of --steps steps of its dense baseline under AdamW",
    )
    group.add_argument(
        "--timing_rounds",
        type=positive_integer,
        default=10,
        help="steps of each that the ratio is taken from; default 10",
    )
    group.add_argument(
        "--like_bytes_of",
        choices=("tt",),
        help="make each dense model as wide as the training bytes of its tt twin (--ranks, --widths) allow",
    )
    group.add_argument(
        "--threads", type=positive_integer, default=os.cpu_count() or 1, help="torch threads; default: all cores"
    )
    group.add_argument(
        "--results_dir", default=str(RESULTS), help="folder of the csv files; default benchmarks/results"
    )


def rank(text: str) -> str:
    """An argparse type."""
    return text if text == "full" else str(positive_integer(text))


def positive_float(text: str) -> float:
    """An argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number; 1e-3, for example, is")
    return value


def _check(arguments: argparse.Namespace) -> None:
    for name in ("code_file", "nli_file", "tokenizer"):
        path = getattr(arguments, name)
        if path and not Path(path).exists():
            raise ValueError(f"--{name} {path} was not found. Needed is the path of a file or folder on this machine.")
    if arguments.task == "nli":
        missing = [f"--{name}" for name in ("nli_file", "tokenizer") if not getattr(arguments, name)]
        if missing:
            raise ValueError(
                f"Task nli needs {' and '.join(missing)}, for example: python -m benchmarks.quality.run nli "
                "--nli_file pairs.parquet --tokenizer bert-base-uncased"
            )
    if arguments.steps and arguments.epochs:
        raise ValueError(f"--steps {arguments.steps} and --epochs {arguments.epochs:g}: give one of them.")
    if arguments.epochs and arguments.task == "bytes":
        raise ValueError(
            f"--epochs {arguments.epochs:g}: task bytes draws its batches at random places and has no epochs. Use "
            f"--steps {DEFAULT_STEPS['bytes']}."
        )
    odd = [width for width in arguments.widths if width % 4]
    if odd:
        raise ValueError(f"--widths {odd[0]} cannot be split into 4 heads. Use a multiple of 4, for example 256.")
