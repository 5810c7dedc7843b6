"""The cases of the tables of speed: which columns of a results file tell them apart, and what each is called."""

import itertools

_EMBEDDING = "embedding 30522 x 768 with optimizer"
_ENCODER = "inference, six-encoder BERT"
_GENERATION = "32 tokens of generation, GPT-2 of six layers"
# File, then the columns that tell its cases apart.
COLUMNS = {
    "bench_step": (
        "model",
        "tokens",
        "dtype",
        "dropout",
        "optimizer",
        "graphs",
        "kernels",
        "compiled",
        "padded",
        "dense_block",
        "embedding_width",
    ),
    "bench_linear": ("shape", "dtype", "rows"),
    "bench_lookup": ("batch", "ids"),
    "bench_inference": ("model", "tokens", "dtype"),
}


def _step_names() -> dict[tuple[str, ...], str]:
    """Every case of bench_step.py, the usual settings first."""
    models = {
        ("bert-6x768", "32x128"): "six-encoder BERT, 32 x 128 tokens",
        ("bert-6x768", "128x128"): "six-encoder BERT, 128 x 128 tokens",
        ("bert-24x1024", "16x512"): "BERT of 24 encoders 1024 wide, 16 x 512 tokens",
        ("roberta-12x768", "8x512"): "masked RoBERTa of 12 layers, 8 x 512 tokens",
        ("roberta-4x768", "8x512"): "masked RoBERTa of 4 layers, 8 x 512 tokens",
        ("roberta-4x768", "8x128"): "masked RoBERTa of 4 layers, 8 x 128 tokens",
        ("gpt2-12x768", "8x512"): "GPT-2 of 12 layers, 8 x 512 tokens",
        ("gpt2-6x768", "8x512"): "GPT-2 of 6 layers, 8 x 512 tokens",
        ("llama-8x1024", "1x2048"): "Llama of 8 layers 1024 wide, 2,048 tokens",
        ("llama-1x4096", "2x2048"): "decoder block 4096 wide, 2 x 2048 tokens",
    }
    settings = (
        {"tt_muon": "", "adamw": ", AdamW"},
        {"fp32": "", "tf32": ", tf32", "bf16": ", bf16 autocast"},
        {"0.1": ", dropout 0.1", "0.0": ", no dropout"},
        {"": "", "yes": ", CUDA graphs"},
        {"": "", "yes": ", our kernels"},
        {"": "", "yes": ", compiled"},
        {"": "", "yes": ", padded rows and a mask"},
        {"": "", "yes": ", head and loss as one block on both sides"},
        {"": "", **{width: f", tables {width} wide" for width in ("64", "128", "256")}},
    )
    names = {}
    for parts in itertools.product(models.items(), *(setting.items() for setting in settings)):
        (model, optimizer, dtype, dropout, *launches), (what, with_, in_, dropped, *how) = zip(*parts, strict=True)
        case = ("bench_step", *model, dtype, dropout, optimizer, *launches)
        names[case] = f"training step, {what}{dropped}{in_}{with_}{''.join(how)}"
    return names


# What a case is called, in the order of the table. Braces take a column of the row.
NAMES = {
    **_step_names(),
    ("bench_linear", "768x768", "fp32", "4096"): "linear 768 -> 768, forward and backward, 4096 rows",
    ("bench_linear", "768x3072", "fp32", "4096"): "linear 768 -> 3072, forward and backward, 4096 rows",
    ("bench_linear", "3072x768", "fp32", "4096"): "linear 3072 -> 768, forward and backward, 4096 rows",
    ("bench_linear", "768x768", "bf16", "4096"): "linear 768 -> 768, forward and backward, 4096 rows, bf16",
    ("bench_linear", "768x3072", "bf16", "4096"): "linear 768 -> 3072, forward and backward, 4096 rows, bf16",
    ("bench_linear", "3072x768", "bf16", "4096"): "linear 3072 -> 768, forward and backward, 4096 rows, bf16",
    ("bench_lookup", "text", "4096"): f"{_EMBEDDING}, {{distinct_ids}} distinct ids",
    ("bench_lookup", "padded", "4096"): f"{_EMBEDDING}, padded batch, {{distinct_ids}} distinct ids",
    ("bench_inference", "bert-6x768", "1x16", "fp32"): f"{_ENCODER}, 1 x 16 tokens",
    ("bench_inference", "bert-6x768", "1x128", "fp32"): f"{_ENCODER}, 1 x 128 tokens",
    ("bench_inference", "bert-6x768", "8x128", "fp32"): f"{_ENCODER}, 8 x 128 tokens",
    ("bench_inference", "gpt2-6x768", "1x16+32", "fp32"): f"{_GENERATION}, 1 prompt of 16",
    ("bench_inference", "gpt2-6x768", "8x16+32", "fp32"): f"{_GENERATION}, 8 prompts of 16",
    ("bench_inference", "gpt2-6x768", "8x512+32", "fp32"): f"{_GENERATION}, 8 prompts of 512",
    ("bench_inference", "bert-6x768", "1x16", "bf16"): f"{_ENCODER}, 1 x 16 tokens, bf16",
    ("bench_inference", "bert-6x768", "1x128", "bf16"): f"{_ENCODER}, 1 x 128 tokens, bf16",
    ("bench_inference", "bert-6x768", "8x128", "bf16"): f"{_ENCODER}, 8 x 128 tokens, bf16",
    ("bench_inference", "gpt2-6x768", "1x16+32", "bf16"): f"{_GENERATION}, 1 prompt of 16, bf16",
    ("bench_inference", "gpt2-6x768", "8x16+32", "bf16"): f"{_GENERATION}, 8 prompts of 16, bf16",
}
