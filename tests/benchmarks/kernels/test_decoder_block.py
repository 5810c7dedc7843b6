"""benchmarks/kernels/decoder_block.py: forward and backward of all seven layers are summed, and of nothing else."""

from benchmarks.kernels.decoder_block import BLOCK_SHAPES, decoder_block


def row(op, shape, name="bf16", **figures):
    case = dict(zip(("tokens", "in", "out", "rank"), shape, strict=True))
    times = {"dense_us": 90.0, "torch_us": 20.0, "kernel_us": 10.0, "floor_us": 8.0}
    return {"op": op, "format": name, **case, **times, "rounds": 3, **figures}


ROWS = [row(op, shape) for shape in BLOCK_SHAPES for op in ("forward", "backward")]


def test_layers_are_summed_as_often_as_a_block_has_them():
    others = [
        row("ffn forward", BLOCK_SHAPES[0]),
        row("forward", BLOCK_SHAPES[0], "fp32"),
        row("forward", (4096, 768, 768, 32)),
        {"op": "halves", "format": "bf16", "layers": 24, "in": 768, "out": 768, "rank": 30},
    ]
    (found,) = decoder_block([*others, *ROWS])
    assert (found["dense_us"], found["torch_us"], found["kernel_us"]) == (14 * 90.0, 14 * 20.0, 14 * 10.0)
    assert (found["ratio_to_dense"], found["ratio_to_torch"], found["of_floor"]) == (9.0, 2.0, 0.8)
    assert (found["tokens"], found["in"], found["rank"], found["rounds"]) == (4096, 4096, 64, 3)


def test_nothing_is_summed_where_a_layer_is_missing():
    assert decoder_block(ROWS[1:]) == []
