"""Time a tensor-train linear layer against nn.Linear, forward and backward, and count what both save for backward.

    python -m benchmarks.speed.linear
    python -m benchmarks.speed.linear --dtype bf16

`--help` says what is compared and how to read the figures.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness.process import in_own_process
from benchmarks.harness.timing import (
    Comparison,
    benchmark_parser,
    check_agreement,
    positive_integer,
    report,
    saved_for_backward,
)
from hf_comera.modules import TTLinear
from hf_comera.ops.low_rank import bias_as_rank, from_latent, to_latent
from loop.measure import DENSE, TENSOR_TRAIN, time_interleaved
from loop.memory import training_peak

DESCRIPTION = """\
Forward and backward (gradients of the input and of all parameters) of a
TTLinear layer and of nn.Linear with the same weight, in turns. Shapes, factors
and ranks are those of the six-encoder BERT of the CoMERA paper.

"Halves given" leaves out building the halves from the cores and sending their
gradient back: a model does that once a step for all of its layers together, a
layer alone pays all of it. The promised ratio is that of halves given and freed
memory kept: compare it with halves_given_ratio under --keep-freed-memory.

Before anything is timed, both layers must give equal outputs and input gradients.
Saved and peak bytes leave out the input.
"""
HALVES_GIVEN = "halves given"
PROMISED_ROWS = 4096
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """One linear layer, and the speed-up promised with halves given, ``PROMISED_ROWS`` rows and float32."""

    in_factors: tuple[int, ...]
    out_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    in_features: int
    out_features: int
    promised: float


SHAPES = (
    Shape((12, 8, 8), (8, 8, 12), (12, 30, 30, 30, 12), 768, 768, 5.6),
    Shape((12, 8, 8), (12, 16, 16), (12, 30, 30, 30, 16), 768, 3072, 8.9),
    Shape((16, 16, 12), (8, 8, 12), (16, 30, 30, 30, 12), 3072, 768, 9.6),
)


def main() -> None:
    """Measure all shapes, print the table, write the rows."""
    parser = benchmark_parser(DESCRIPTION, rounds=31)
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of parameters and input; default fp32, which promises are for"
    )
    parser.add_argument(
        "--rows", type=positive_integer, default=PROMISED_ROWS, help="rows of the input (batch x tokens); default 4096"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    comparisons = [compare(shape, args.dtype, args.rows, args.rounds, args.threads) for shape in SHAPES]
    title = f"Linear layer, forward + backward, {args.rows} rows, {args.dtype}"
    report(title, comparisons, save_as=None if args.no_save else "bench_linear")


def compare(shape: Shape, dtype: str, rows: int, rounds: int, threads: int) -> Comparison:
    """Time one shape."""
    torch.manual_seed(0)
    x, dy = draw_rows(shape, dtype, rows)
    layers = build_twins(shape, DTYPES[dtype])
    name = f"{shape.in_features}x{shape.out_features}"
    check_twins(layers, x, dy, name, TOLERANCE[dtype])
    candidates = {form: partial(forward_backward, layer, x, dy) for form, layer in layers.items()}
    candidates[HALVES_GIVEN] = partial(forward_backward, GivenHalves(layers[TENSOR_TRAIN]), x, dy)
    saved_bytes = {
        form: saved_for_backward(partial(layer, x), [x, *layer.parameters()]) for form, layer in layers.items()
    }
    timings = time_interleaved(candidates, rounds, label=name)
    return Comparison(
        case={"shape": name, "dtype": dtype, "rows": rows},
        timings=timings,
        saved_bytes=saved_bytes,
        peak_bytes={form: in_own_process(threads, peak, shape, dtype, rows, form) for form in layers},
        promised=shape.promised if (dtype, rows) == ("fp32", PROMISED_ROWS) else None,
        extra={
            "halves_given_ms": round(timings.median(HALVES_GIVEN) * 1e3, 3),
            "halves_given_ratio": round(timings.ratio(HALVES_GIVEN, DENSE), 2),
        },
    )


def draw_rows(shape: Shape, dtype: str, rows: int) -> tuple[Tensor, Tensor]:
    """Input and gradient of the output."""
    x = torch.randn(rows, shape.in_features, dtype=DTYPES[dtype], requires_grad=True)
    return x, torch.randn(rows, shape.out_features, dtype=DTYPES[dtype])


def peak(shape: Shape, dtype: str, rows: int, form: str) -> int | None:
    """The most memory that one form takes, for a process of its own."""
    layer = build_twins(shape, DTYPES[dtype])[form]
    return training_peak(partial(forward_backward, layer, *draw_rows(shape, dtype, rows)), layer)


class GivenHalves(nn.Module):
    """A tensor-train layer whose halves are parameters."""

    def __init__(self, layer: TTLinear) -> None:
        super().__init__()
        halves = layer.halves_cache.halves(layer, layer.core_0.dtype)
        self.left, self.right = (nn.Parameter(half.detach().clone()) for half in halves)
        self.bias, self.rank = layer.bias, layer.middle_rank

    def forward(self, x: Tensor) -> Tensor:
        """What the layer computes."""
        return from_latent(*bias_as_rank(to_latent(x, self.left), self.right, self.bias, self.rank))


def check_twins(layers: dict[str, nn.Module], x: Tensor, dy: Tensor, name: str, tolerance: float) -> None:
    """Refuse to time layers whose outputs or input gradients differ."""
    outputs = {form: layer(x) for form, layer in layers.items()}
    gradients = {form: torch.autograd.grad(y, x, dy)[0] for form, y in outputs.items()}
    for what, found in (("output", outputs), ("input gradient", gradients)):
        check_agreement(f"{name}, {what}", found[TENSOR_TRAIN], found[DENSE], tolerance)


def forward_backward(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Output and all gradients of one layer."""
    return torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)


def build_twins(shape: Shape, dtype: torch.dtype) -> dict[str, nn.Module]:
    """A tensor-train layer with random cores, and the dense layer with the same weight and bias."""
    tensor_train = TTLinear(
        shape.in_features,
        shape.out_features,
        in_factors=shape.in_factors,
        out_factors=shape.out_factors,
        ranks=shape.ranks,
        dtype=dtype,
    )
    dense = nn.Linear(shape.in_features, shape.out_features, dtype=dtype)
    with torch.no_grad():
        tensor_train.bias.normal_(std=0.02)
        dense.weight.copy_(tensor_train.dense())
        dense.bias.copy_(tensor_train.bias)
    return {DENSE: dense, TENSOR_TRAIN: tensor_train}


if __name__ == "__main__":
    main()
