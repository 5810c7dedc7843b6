"""Time the TT-SVD of dense weights: how long it takes to compress a pretrained layer.

python -m benchmarks.speed.decomposition
"""

from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.harness.timing import RESULTS, benchmark_parser
from hf_comera.modules import TensorTrainModule, TTLinear, TTMEmbedding
from hf_comera.tt.decomposition import relative_error
from loop.measure import MACHINE_IDENTITY, machine, replace_rows, time_interleaved

DESCRIPTION = """\
Decompose dense weights of common sizes into tensor-train cores, at the default
factors and rank 30, and measure the time and the relative Frobenius error.

The weights are random with singular values that fall as 1 / index: closer to
trained ones than plain noise. Errors of real weights differ; for those, print
model.comera_plan() after compressing.
"""
LAYERS: dict[str, Callable[[], TensorTrainModule]] = {
    "embedding 30522x768": partial(TTMEmbedding, 30522, 768, device="meta"),
    "linear 768x768": partial(TTLinear, 768, 768, device="meta"),
    "linear 768x3072": partial(TTLinear, 768, 3072, device="meta"),
    "linear 4096x4096": partial(TTLinear, 4096, 4096, device="meta"),
}


def main() -> None:
    """Measure all layers, print the table, write the rows."""
    args = benchmark_parser(DESCRIPTION, rounds=5).parse_args()
    torch.set_num_threads(args.threads)
    rows = [measure(name, make(), args.rounds) for name, make in LAYERS.items()]
    table = Table("layer", "seconds", "relative error")
    for row in rows:
        table.add_row(*(str(row[name]) for name in ("layer", "seconds", "relative_error")))
    Console().print(table)
    if not args.no_save:
        path = RESULTS / "bench_decomposition.csv"
        here = machine()
        replace_rows(path, [{**row, **here} for row in rows], ["layer", *MACHINE_IDENTITY])


def measure(name: str, layer: TensorTrainModule, rounds: int) -> dict[str, str | float | int]:
    """Time one layer."""
    weight = decaying_matrix(*layer.weight_shape())
    timings = time_interleaved({"decompose": partial(layer.load_dense, weight)}, rounds, warmup=1, label=name)
    error = relative_error(layer.dense().detach(), weight)
    seconds = round(timings.median("decompose"), 3)
    return {"layer": name, "seconds": seconds, "relative_error": round(error, 4), "rounds": rounds}


def decaying_matrix(rows: int, columns: int) -> Tensor:
    """A random matrix whose k-th singular value is about 1 / k."""
    torch.manual_seed(0)
    count = min(rows, columns, 512)
    left, right = torch.randn(rows, count), torch.randn(count, columns)
    return (left / torch.arange(1, count + 1)) @ right


if __name__ == "__main__":
    main()
