"""Time the CUDA kernels against plain torch and against dense layers, on a GPU.

    python -m benchmarks.kernels.run

`--help` says what is compared. Without a GPU nothing is measured.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import gelu

from benchmarks.harness.timing import RESULTS, check_agreement, positive_integer
from benchmarks.kernels.candidates import CHAIN_OPS, KERNEL, TOKENS, TORCH
from benchmarks.kernels.decoder_block import BLOCK_SHAPES, decoder_block
from benchmarks.kernels.roofline import FORMATS, WORK, Ceilings, measure_ceilings, time_on, use_format
from hf_comera.ops import use_kernels
from hf_comera.ops.cuda.dispatch import serve_devices
from hf_comera.ops.cuda.library import kernels_refusal
from hf_comera.ops.cuda.low_rank_linear import low_rank_linear, low_rank_linear_backward
from hf_comera.ops.cuda.tiled_mlp import tiled_mlp, tiled_mlp_backward
from loop.measure import DENSE, Timings, machine, replace_rows

DESCRIPTION = """\
Low-rank linear layers and feed-forward blocks (forward, backward), halves
of the tensor trains of many layers and embedding lookups (both also with
gradients): our kernels, the same in plain torch, and the dense layers
that they stand for, in turns; halves have no dense counterpart. For a lookup,
"in" is the vocabulary. On a GPU each candidate is a CUDA graph of several
calls, so that the time of launching from Python is not measured.

The floor is the least time that a case can take: arguments read and results
written once, or its arithmetic, whichever takes longer at the speeds of a large
copy and of large products on this device, which are measured first. "Of floor"
is how much of that a kernel reaches. It can be more than 1 where calls find
their arguments in the cache, as those of smaller cases do, and in fp32, where our
kernels multiply on tensor cores and torch does not. "Decoder block" sums
forward and backward of the seven linear layers of a block 4096 wide ("in"), with
a feed-forward part of 11008 ("out").

Before anything is timed, kernels and plain torch must agree.
"""
TOLERANCE = {"bf16": 2e-2, "fp32": 1e-5, "tf32": 5e-3}
SHAPES = [
    *((4096, 768, 768, 32), (4096, 768, 3072, 32), (4096, 3072, 768, 32), (16384, 1024, 4096, 64)),
    *BLOCK_SHAPES,
]
SMALL_SHAPES = [(40, 64, 96, 16)]
IDENTITY = ["op", "format", "tokens", "layers", "in", "out", "rank", "gpu"]
"""Columns that tell rows of the results file apart."""
GELU: dict[str, Any] = {"activation": "gelu", "scale": None}


def main() -> None:
    """Measure every case, print the table, write the rows."""
    args = parse_arguments()
    device = torch.device("cpu" if args.emulated else "cuda", None if args.emulated else 0)
    console = Console()
    if not args.emulated and (reason := kernels_refusal(device)):
        console.print(f"Nothing was measured: {reason}.", soft_wrap=True)
        return
    use_kernels(False)  # plain torch is what they are compared with
    serve_devices(device.type)
    torch.manual_seed(0)
    ceilings = measure_ceilings(device, args.rounds, size=64 if args.emulated else 8192)
    show_ceilings(console, ceilings)
    rows: list[dict[str, object]] = []
    for name in ["bf16"] if args.emulated else FORMATS:
        for case, make, shape in cases(name, args.emulated):
            rows.append(measure_case(case, make, shape, device, ceilings, args.rounds))
    rows += decoder_block(rows)
    report(console, rows)
    if not args.emulated and not args.no_save:
        here = machine() | {"gpu": torch.cuda.get_device_name(device)}
        replace_rows(RESULTS / "bench_kernels.csv", [row | here for row in rows], IDENTITY)


def cases(name: str, emulated: bool) -> Iterator[tuple[dict[str, object], Callable[..., Any], tuple[int, ...]]]:
    """What identifies each case of a format, what makes its candidates, and from which sizes."""
    ops = {op: (TOKENS, make, SHAPES, SMALL_SHAPES) for op, make in PRODUCT_OPS.items()}
    if name != "tf32":  # which chains of cores are never multiplied in
        ops |= CHAIN_OPS
    for op, (names, make, shapes, small_shapes) in ops.items():
        for shape in small_shapes if emulated else shapes:
            yield {"op": op, "format": name} | dict(zip(names, shape, strict=True)), make, shape


def measure_case(
    case: dict[str, object],
    make: Callable[..., Any],
    shape: tuple[int, ...],
    device: torch.device,
    ceilings: Ceilings,
    rounds: int,
) -> dict[str, object]:
    """The row of one case.

    Raises:
        RuntimeError: If kernel and plain torch disagree.
    """
    name = str(case["format"])
    dtype = use_format(name)
    candidates = make(shape, dtype, device)
    check_agreement(str(case), candidates[KERNEL](), candidates[TORCH](), TOLERANCE[name])
    floor = ceilings.seconds(WORK[str(case["op"])](shape, dtype.itemsize), name)
    return case | figures(time_on(device, candidates, rounds), floor)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.kernels.run",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=positive_integer, default=101, help="times that each is measured; default 101"
    )
    parser.add_argument("--no-save", action="store_true", help="only print; else rows go to benchmarks/results/")
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="run one tiny case on the CPU through emulated kernels: a test of this script, its times mean nothing",
    )
    return parser.parse_args()


def draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers whose products neither grow nor vanish."""
    return (torch.randn(shape) / shape[-1] ** 0.25).to(device, dtype)


def forward(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """``y``, three ways."""
    num_tokens, in_features, out_features, rank = shape
    make = partial(draw, device, dtype)
    x, left, right = make(num_tokens, in_features), make(rank, in_features), make(rank, out_features)
    weight, bias = make(out_features, in_features), make(out_features)
    return {
        DENSE: lambda: torch.nn.functional.linear(x, weight, bias),
        TORCH: lambda: torch.addmm(bias, x @ left.T, right),
        KERNEL: lambda: low_rank_linear(x, left, right, bias)[0],
    }


def backward(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """All gradients, three ways; the one of the input is returned."""
    num_tokens, in_features, out_features, rank = shape
    make = partial(draw, device, dtype)
    x, left, right = make(num_tokens, in_features), make(rank, in_features), make(rank, out_features)
    weight, grad_y, code = make(out_features, in_features), make(num_tokens, out_features), make(num_tokens, rank)

    def dense() -> Tensor:
        dx, _, _ = grad_y @ weight, grad_y.T @ x, grad_y.sum(0)
        return dx

    def plain() -> Tensor:
        dlatent = grad_y @ right.T
        dx, _, _, _ = dlatent @ left, dlatent.T @ x, code.T @ grad_y, grad_y.sum(0)
        return dx

    return {
        DENSE: dense,
        TORCH: plain,
        KERNEL: lambda: low_rank_linear_backward(grad_y, None, x, code, left, right)[0],
    }


def ffn_forward(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """``y`` of a block from ``in`` to ``out`` features and back with the exact GELU, three ways."""
    num_tokens, features, hidden, rank = shape
    make = partial(draw, device, dtype)
    x, left_in, right_in = make(num_tokens, features), make(rank, features), make(rank, hidden)
    left_out, right_out = make(rank, hidden), make(rank, features)
    up, down = make(hidden, features), make(features, hidden)
    linear = torch.nn.functional.linear
    return {
        DENSE: lambda: linear(gelu(linear(x, up)), down),
        TORCH: lambda: gelu(x @ left_in.T @ right_in) @ left_out.T @ right_out,
        KERNEL: lambda: tiled_mlp([x @ left_in.T], [right_in], [None], [], left_out, **GELU) @ right_out,
    }


def ffn_backward(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """All gradients of such a block, three ways; that of the input is returned. The kernel remakes what is hidden."""
    num_tokens, features, hidden, rank = shape
    make, slope = partial(draw, device, dtype), torch.ops.aten.gelu_backward
    x, left_in, right_in = make(num_tokens, features), make(rank, features), make(rank, hidden)
    left_out, right_out, grad_y = make(rank, hidden), make(rank, features), make(num_tokens, features)
    up, down = make(hidden, features), make(features, hidden)
    code_in, wide_dense = x @ left_in.T, x @ up.T
    wide = code_in @ right_in
    activated, activated_dense = gelu(wide), gelu(wide_dense)
    code_out = activated @ left_out.T

    def dense() -> Tensor:
        dwide, _ = slope(grad_y @ down, wide_dense), grad_y.T @ activated_dense
        dx, _ = dwide @ up, dwide.T @ x
        return dx

    def around(middle: Callable[[Tensor], Tensor]) -> Tensor:
        dcode_out, _ = grad_y @ right_out.T, code_out.T @ grad_y
        dcode_in = middle(dcode_out)
        dx, _ = dcode_in @ left_in, dcode_in.T @ x
        return dx

    def written_out(dcode_out: Tensor) -> Tensor:
        dwide, _ = slope(dcode_out @ left_out, wide), dcode_out.T @ activated
        dcode_in, _ = dwide @ right_in.T, code_in.T @ dwide
        return dcode_in

    def on_chip(dcode_out: Tensor) -> Tensor:
        return tiled_mlp_backward(dcode_out, [code_in], [right_in], [None], [], left_out, **GELU)[1]

    return {DENSE: dense, TORCH: lambda: around(written_out), KERNEL: lambda: around(on_chip)}


PRODUCT_OPS = {"forward": forward, "backward": backward, "ffn forward": ffn_forward, "ffn backward": ffn_backward}


def figures(timings: Timings, floor: float) -> dict[str, float]:
    """Microseconds, how many times faster the kernel is than each of the others, and how near to the floor."""
    microseconds = {f"{name}_us": round(timings.median(name) * 1e6, 2) for name in timings.seconds}
    others = [name for name in timings.seconds if name != KERNEL]
    ratios = {f"ratio_to_{name}": round(timings.ratio(KERNEL, name), 2) for name in others}
    floors = {"floor_us": round(floor * 1e6, 2), "of_floor": round(floor / timings.median(KERNEL), 3)}
    return microseconds | ratios | floors | {"rounds": len(timings.seconds[KERNEL])}


def show_ceilings(console: Console, ceilings: Ceilings) -> None:
    """One line."""
    speeds = ", ".join(f"{name} {speed / 1e12:.3g}" for name, speed in ceilings.flops_per_s.items())
    console.print(f"Ceilings: {ceilings.bytes_per_s / 1e12:.3g} TB/s; TFLOP/s: {speeds}.", soft_wrap=True)


def report(console: Console, rows: list[dict[str, object]]) -> None:
    """Print one line a case."""
    table = Table("case", "shape", title="Microseconds of a call, and how many times faster the kernel is")
    for name in (DENSE, TORCH, KERNEL, "x dense", "x torch", "floor", "of floor"):
        table.add_column(name, justify="right")
    for row in rows:
        first = f"{row['layers']} layers" if "layers" in row else row["tokens"]
        sizes = f"{first} x {row['in']} x {row['out']} r{row['rank']}"
        keys = ("dense_us", "torch_us", "kernel_us", "ratio_to_dense", "ratio_to_torch", "floor_us", "of_floor")
        numbers = (f"{row[key]:g}" if key in row else "" for key in keys)
        table.add_row(f"{row['op']} {row['format']}", sizes, *numbers)
    console.print(table)


if __name__ == "__main__":
    main()
