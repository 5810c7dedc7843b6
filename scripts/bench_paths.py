"""Time every contraction path of a tensor-train product, and compare the planner's choice with the fastest.

    python scripts/bench_paths.py --threads 1
    python scripts/bench_paths.py --threads 1 --dtype bf16

`--help` says what is compared and how to read the figures.
"""

from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_comera.modules.planned_path import planned_path
from hf_comera.ops import path_linear
from hf_comera.tt.contraction import apply_parts, build_parts
from hf_comera.tt.cores import core_shapes, draw_cores
from hf_comera.tt.machine import Machine, calibrated_cpu
from hf_comera.tt.path import ContractionPath, candidate_paths, plan_path
from interleaved_timing import (
    MACHINE_IDENTITY,
    RESULTS,
    Timings,
    benchmark_parser,
    check_agreement,
    machine,
    positive_integer,
    replace_rows,
    time_interleaved,
)

DESCRIPTION = """\
All ways to compute x @ W for a tensor train W, in turns: two-sided, dense, and
cut at every other bond. "inference" is a forward pass with all parts at hand,
"training" forward and backward (gradients of the input and of all cores) with
all parts built from the cores.

The planner knows this CPU from a calibration of some tenths of a second. Planned
over best is the time of the path it picks over that of the path measured best,
the median over the rounds; 1 if they are the same.

"Taken" is the path that a layer takes. It goes by preset speeds instead of a
calibration; by parts at hand, since a model makes those of all its layers
together; and leaves the two-sided path only for one that should take a fifth
less. In training its parts are built here like all others.
"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
CLOSE_ENOUGH = 1.1
SECONDS_PER_TURN = 0.004  # calls shorter than this are repeated within a turn
VERDICTS = {"planned": "Planned path", "taken": "Path that a layer takes"}
CASE = ("layer", "rank", "rows", "pass", "dtype")


@dataclass(frozen=True)
class Layer:
    """One linear layer; ``ranks`` of its inner bonds."""

    in_factors: tuple[int, ...]
    out_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    in_features: int
    out_features: int
    rows: tuple[int, ...] = (1, 32, 512, 4096)

    @property
    def name(self) -> str:
        """Its sizes."""
        return f"{self.in_features}x{self.out_features}"

    @property
    def rank(self) -> int:
        """That of the middle bond."""
        return self.ranks[len(self.in_factors) - 1]


LAYERS = (
    Layer((12, 8, 8), (8, 8, 12), (12, 30, 30, 30, 12), 768, 768),
    Layer((12, 8, 8), (8, 8, 12), (12, 96, 256, 96, 12), 768, 768),
    Layer((12, 8, 8), (8, 8, 12), (12, 96, 384, 96, 12), 768, 768),
    Layer((12, 8, 8), (8, 8, 12), (12, 96, 512, 96, 12), 768, 768),
    Layer((12, 8, 8), (12, 16, 16), (12, 30, 30, 30, 16), 768, 3072),
    Layer((16, 16, 12), (8, 8, 12), (16, 30, 30, 30, 12), 3072, 768),
    Layer((16, 16, 16), (16, 16, 16), (16, 64, 64, 64, 16), 4096, 4096, (1, 32, 512)),
)


def main() -> None:
    """Measure all layers, print the table, write the rows."""
    parser = benchmark_parser(DESCRIPTION, rounds=9)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of cores and input; default fp32")
    parser.add_argument("--max-rows", type=positive_integer, default=4096, help="leave out larger cases; default 4096")
    names = sorted({layer.name for layer in LAYERS})
    parser.add_argument("--layers", nargs="+", choices=names, default=names, help="default: all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cpu = calibrated_cpu(DTYPES[args.dtype])
    layers = [layer for layer in LAYERS if layer.name in args.layers]
    cases = [(layer, rows) for layer in layers for rows in layer.rows if rows <= args.max_rows]
    measured = [
        compare(layer, rows, training, args.dtype, args.rounds, cpu)
        for layer, rows in cases
        for training in (False, True)
    ]
    show(measured)
    if not args.no_save:
        rows = [{**row, "rounds": args.rounds, **machine()} for row in measured]
        replace_rows(RESULTS / "bench_paths.csv", rows, [*CASE, *MACHINE_IDENTITY])
        print(f"Written to {RESULTS / 'bench_paths.csv'}")


def compare(
    layer: Layer, rows: int, training: bool, dtype: str, rounds: int, cpu: Machine
) -> dict[str, str | int | float]:
    """Time all paths of one case: a row of the csv file."""
    torch.manual_seed(0)
    settings = {"training": training, "halves_cached": not training, "machine": cpu, "dtype": DTYPES[dtype]}
    problem = plan_path(layer.in_factors, layer.out_factors, layer.ranks, rows, **settings).problem
    paths = candidate_paths(problem)
    cores = [torch.empty(shape) for shape in core_shapes((*layer.in_factors, *layer.out_factors), layer.ranks)]
    draw_cores(cores, 0.02)
    cores = [core.to(DTYPES[dtype]).requires_grad_(training) for core in cores]
    x = torch.randn(rows, layer.in_features, dtype=DTYPES[dtype], requires_grad=training)
    check_paths(f"{layer.name}, {rows} rows", x, cores, paths, TOLERANCE[dtype])
    repeats = max(1, min(200, int(SECONDS_PER_TURN / paths[0].seconds)))
    candidates = {path.label: partial(repeat, repeats, candidate(path, x, cores)) for path in paths}
    what = "training" if training else "inference"
    timings = time_interleaved(candidates, rounds, label=f"{layer.name} r{layer.rank}, {rows} rows, {what}")
    case = {"layer": layer.name, "rank": layer.rank, "rows": rows, "pass": what, "dtype": dtype}
    sizes = (layer.in_factors, layer.out_factors, layer.in_features, layer.out_features)
    taken, _ = planned_path(sizes, layer.ranks, rows, DTYPES[dtype], False, training=training)
    return {**case, **figures(paths, taken.label, timings, repeats)}


def candidate(path: ContractionPath, x: Tensor, cores: list[Tensor]) -> partial[object]:
    """What is timed of one path."""
    if x.requires_grad:
        return partial(forward_backward, path, x, cores, torch.randn(len(x), path.problem.out_features, dtype=x.dtype))
    return partial(apply_parts, x, build_parts(cores, path), path)


def forward_backward(path: ContractionPath, x: Tensor, cores: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """Output and all gradients."""
    return torch.autograd.grad(path_linear(x, cores, path), [x, *cores], dy)


def repeat(times: int, compute: partial[object]) -> None:
    """Call ``compute`` so often."""
    for _ in range(times):
        compute()


def check_paths(
    what: str, x: Tensor, cores: list[Tensor], paths: tuple[ContractionPath, ...], tolerance: float
) -> None:
    """Refuse to time paths whose outputs differ."""
    expected = path_linear(x, cores, next(path for path in paths if path.kind == "dense"))
    for path in paths:
        check_agreement(f"{what}, {path.label}", path_linear(x, cores, path), expected, tolerance)


def figures(paths: tuple[ContractionPath, ...], taken: str, timings: Timings, repeats: int) -> dict[str, str | float]:
    """Measured and predicted milliseconds of the two-sided, the dense and the best other path, and the verdicts."""
    row: dict[str, str | float] = {}
    for kind in ("two-sided", "dense", "split"):
        path = min((path for path in paths if path.kind == kind), key=lambda path: timings.median(path.label))
        name = kind.replace("-", "_")
        if kind == "split":
            row["split"] = path.label.removeprefix("split ")
        row[f"{name}_ms"] = significant(timings.median(path.label) / repeats * 1e3)
        row[f"{name}_predicted_ms"] = significant(path.seconds * 1e3)
    best = min((path.label for path in paths), key=timings.median)
    chosen = dict(zip(VERDICTS, (paths[0].label, taken), strict=True))
    over_best = {f"{name}_over_best": round(timings.ratio(best, label), 3) for name, label in chosen.items()}
    return {**row, **chosen, "best": best, **over_best}


def significant(value: float) -> float:
    """``value`` with three significant digits."""
    return float(f"{value:.3g}")


def show(measured: list[dict[str, str | int | float]]) -> None:
    """Print the table and how often the planner was right."""
    headings = ("layer", "rank", "rows", "pass", "two-sided", "dense", "best split", "best", *VERDICTS)
    table = Table(*headings, title="ms measured (predicted)", show_edge=False, pad_edge=False)
    for row in measured:
        times = [f"{row[f'{name}_ms']} ({row[f'{name}_predicted_ms']})" for name in ("two_sided", "dense", "split")]
        what = [str(row[name]) for name in ("layer", "rank", "rows", "pass")]
        verdicts = [f"{row[name]} {row[f'{name}_over_best']}{'' if close(row, name) else ' !'}" for name in VERDICTS]
        table.add_row(*what, *times, str(row["best"]), *verdicts)
    console = Console(width=160)
    console.print(table)
    for name, what_it_is in VERDICTS.items():
        right = sum(close(row, name) for row in measured)
        console.print(f"{what_it_is} within {CLOSE_ENOUGH - 1:.0%} of the best in {right} of {len(measured)} cases.")


def close(row: dict[str, str | int | float], name: str) -> bool:
    """Whether a choice was right, or hardly wrong."""
    return float(row[f"{name}_over_best"]) <= CLOSE_ENOUGH


if __name__ == "__main__":
    main()
