"""Measure the memory of a training: what autograd keeps under each policy, a whole step by method, and the losses.

    python -m benchmarks.memory.run --part policies
    python -m benchmarks.memory.run --part methods --picture
    python -m benchmarks.memory.run --part losses --seeds 0 1 2

`--help` says what is compared and how to read the figures.
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from transformers.utils import logging

from benchmarks.harness.timing import RESULTS, benchmark_parser, positive_integer
from benchmarks.memory.losses import measure_losses, show_losses
from benchmarks.memory.methods import PICTURE, draw_methods, measure_methods, show_methods
from benchmarks.memory.policies import GROUPS, measure_group, show_policies
from loop.measure import MACHINE_IDENTITY, machine, replace_rows

DESCRIPTION = """\
Four parts; without --part all of them, one after the other.

policies  The six-encoder BERT of benchmarks.speed.step, 32 x 128 tokens, fp32, without
          dropout and with 0.1, in tensor-train form and dense. For each
          activation policy (hf_comera.set_activation_policy): bytes saved for
          backward, peak memory and time of forward and backward, and the error
          of the gradient. "attention again" is attention="recompute".
models    The same for a GPT-2 of 24 layers and a Llama of 8, both 1024 wide.
methods   Weights, gradients, optimizer state and activations of a whole
          training step of the BERT on 1 x 128 tokens: dense with AdamW, GaLore
          and 8-bit AdamW, tensor train with TTMuon, and with CoatAdamW under
          "rank+fp8". GaLore and 8-bit AdamW are measured if they are installed
          (pip install galore-torch, which brings bitsandbytes), never estimated.
losses    The demo's RoBERTa in tensor-train form, masked language modelling on
          Python functions: AdamW in fp32 against CoatAdamW under "rank+fp8",
          all else equal.
"""
HOW_TO_READ = """\
How to read the figures: green and red say on which side of the promise beside
it a figure is. Memory is measured in a process for each candidate, which hands
back freed memory at once: the highest resident size during a step (Linux resets
VmHWM through /proc/self/clear_refs), less the resident size before it, the
larger of two steps after one that is not counted. Where the kernel forbids the
reset, VmHWM is that of the whole process, an upper bound, and column peak_by
says so; without /proc there is no peak. On a GPU the allocator is asked.
Times are medians over rounds in which candidates take turns, in one process
with the memory settings of any other; shares are taken within a round.
"""
Row = dict[str, str | int | float]
PARTS = ("policies", "models", "methods", "losses")
IDENTITY = ("part", "model", "tokens", "dropout", "form", "policy", "optimizer", "steps", "seed", "lr", "data", "gpu")


def main() -> None:
    """Measure the wanted parts, print the tables, write the rows."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    console = Console()
    for part in args.part:
        if part in ("policies", "models"):
            for group in GROUPS[part, args.sizes]:
                rows = measure_group(group, args.device, args.threads, args.rounds)
                show_policies(rows, console)
                save(part, rows, args, console)
        elif part == "methods":
            rows = measure_methods(args.sizes, args.device, args.threads, console)
            show_methods(rows, console)
            draw(rows, args.picture, console)
            save(part, rows, args, console)
        else:
            rows = measure_losses(args.sizes, args.steps, args.seeds, args.code_file, lr=args.lr, device=args.device)
            show_losses(rows, console)
            save(part, rows, args, console)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = benchmark_parser(DESCRIPTION, rounds=5, how_to_read=HOW_TO_READ)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="default: all four")
    parser.add_argument(
        "--sizes",
        choices=("full", "tiny"),
        default="full",
        help="tiny: small models, to see the script work in seconds; their figures mean nothing. Default full",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="part losses; default 0 1 2")
    parser.add_argument("--steps", type=positive_integer, default=300, help="part losses; default 300")
    parser.add_argument("--lr", type=float, default=1e-3, help="part losses: rate; default 1e-3")
    parser.add_argument(
        "--code_file",
        help="part losses: parquet, json or jsonl with the columns code and docstring; default: functions of the "
        "standard library, as in the demo",
    )
    parser.add_argument(
        "--picture",
        nargs="?",
        type=Path,
        const=PICTURE,
        metavar="PATH",
        help="part methods: draw it; without a path to docs/pictures/memory_methods.png",
    )
    return parser.parse_args()


def draw(rows: list[Row], path: Path | None, console: Console) -> None:
    """Draw the picture if it is wanted."""
    if path is None:
        return
    drawn = draw_methods(rows, path)
    missing = 'No picture: matplotlib is not installed. pip install "hf_comera[plots]"'
    console.print(f"Drawn: {path}" if drawn else missing, markup=False, soft_wrap=True)


def save(part: str, rows: list[Row], args: argparse.Namespace, console: Console) -> None:
    """Write the rows, unless that is not wanted; older ones of the same cases on the same machine go."""
    if args.no_save:
        return
    here = machine() | {"gpu": torch.cuda.get_device_name() if args.device == "cuda" else ""}
    path = RESULTS / "bench_memory.csv"
    replace_rows(path, [{"part": part, **row, **here} for row in rows], [*IDENTITY, *MACHINE_IDENTITY])
    console.print(f"Written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
