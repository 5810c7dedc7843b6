"""The linear layers of a decoder block 4096 wide, summed from the rows that benchmarks/kernels/run.py has of each."""

from collections.abc import Sequence

__all__ = ["BLOCK_SHAPES", "decoder_block"]

TOKENS, WIDTH, HIDDEN, RANK = 4096, 4096, 11008, 64
FORMAT = "bf16"
NUM_LAYERS = {
    (TOKENS, WIDTH, WIDTH, RANK): 4,  # query, key, value, output
    (TOKENS, WIDTH, HIDDEN, RANK): 2,  # gate, up
    (TOKENS, HIDDEN, WIDTH, RANK): 1,  # down
}
BLOCK_SHAPES = list(NUM_LAYERS)
SUMMED = ("dense_us", "torch_us", "kernel_us", "floor_us")


def decoder_block(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """A row with forward and backward of all layers, one after the other; none where a layer was not measured."""
    parts = []
    for row in rows:
        shape = tuple(row[name] for name in ("tokens", "in", "out", "rank")) if "tokens" in row else None
        if row["op"] in ("forward", "backward") and row["format"] == FORMAT and shape in NUM_LAYERS:
            parts.append((NUM_LAYERS[shape], row))
    if len(parts) != 2 * len(NUM_LAYERS):
        return []
    sums = {name: sum(count * float(str(row[name])) for count, row in parts) for name in SUMMED}
    ratios = {f"ratio_to_{name}": round(sums[f"{name}_us"] / sums["kernel_us"], 2) for name in ("dense", "torch")}
    case = {"op": "decoder block", "format": FORMAT, "tokens": TOKENS, "in": WIDTH, "out": HIDDEN, "rank": RANK}
    figures = {name: round(value, 2) for name, value in sums.items()}
    of_floor = round(sums["floor_us"] / sums["kernel_us"], 3)
    return [{**case, **figures, **ratios, "of_floor": of_floor, "rounds": parts[0][1]["rounds"]}]
