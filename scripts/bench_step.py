"""Time a whole training step of the six-encoder BERT of the CoMERA paper, tensor train against dense.

    python scripts/bench_step.py
    python scripts/bench_step.py --dropout 0
    python scripts/bench_step.py --dtype bf16

`--help` says what is compared and how to read the figures.
"""

import copy
import statistics
import time
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import BertForSequenceClassification, PreTrainedModel

from hf_comera import CompressionPlan, TTMuon, comera_param_groups, get_comera_model, size_report
from hf_comera.compress import LayerPlan
from interleaved_timing import (
    DENSE,
    TENSOR_TRAIN,
    Comparison,
    benchmark_parser,
    check_agreement,
    report,
    saved_for_backward,
    time_interleaved,
)
from six_encoders import DENSE_PARAMETERS, TENSOR_TRAIN_PARAMETERS, paper_shapes, six_encoders

DESCRIPTION = """\
Forward, backward, optimizer and zero_grad of BertForSequenceClassification
with six layers (hidden size 768, 12 heads, FFN 3072, 30522 tokens, 3 labels) on
32 x 128 random tokens, in tensor-train form and dense, in turns. Factors and
ranks are those of the CoMERA paper's experiment on MNLI; they are printed, and
the parameters counted, first. The optimizer is fused AdamW for the dense model
and TTMuon for the other; --optimizer adamw gives both AdamW. The dense model is the merged tensor-train one:
both must give equal logits before anything is timed.

On a CPU much of what is left is dropout, whose random numbers torch draws in
one thread: compare --dropout 0.
"""
SEQUENCES, LENGTH = 32, 128
PROMISED = 3.4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Build both models, measure the step, print the table, write the row."""
    parser = benchmark_parser(DESCRIPTION, rounds=15)
    parser.add_argument("--dropout", type=float, default=0.1, help="of hidden states and attention; default 0.1")
    parser.add_argument(
        "--optimizer", choices=("tt_muon", "adamw"), default="tt_muon", help="of the tensor train; default tt_muon"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="bf16: under autocast, parameters stay fp32; default fp32"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    models = build_models(args.dropout)
    comparison = compare(models, args.dtype, args.dropout, args.optimizer, args.rounds)
    title = f"Training step of BERT with six layers, {SEQUENCES} x {LENGTH} tokens"
    report(title, [comparison], save_as=None if args.no_save else "bench_step")


def build_models(dropout: float) -> dict[str, PreTrainedModel]:
    """The tensor-train model, and the dense one that computes the same.

    Raises:
        RuntimeError: If a model has not as many parameters as it should, or the logits of the two differ.
    """
    config = six_encoders(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    tensor_train = get_comera_model(BertForSequenceClassification, paper_shapes(), config=config)
    print_plan(tensor_train.comera_plan())
    models = {DENSE: copy.deepcopy(tensor_train).merge_and_unload(), TENSOR_TRAIN: tensor_train}
    for form, model in models.items():
        found = size_report(model).parameters
        expected = TENSOR_TRAIN_PARAMETERS if form == TENSOR_TRAIN else DENSE_PARAMETERS
        if found != expected:
            raise RuntimeError(
                f"The {form} model has {found:,} parameters instead of {expected:,}: its factors or ranks are others."
            )
    ids = torch.randint(config.vocab_size, (2, LENGTH))
    with torch.no_grad():
        logits = {form: model.eval()(input_ids=ids).logits for form, model in models.items()}
    check_agreement("logits", logits[TENSOR_TRAIN], logits[DENSE], 1e-4)
    return models


def print_plan(compression: CompressionPlan) -> None:
    """Layers of equal shape in one line each, and the whole model."""
    table = Table(title="Compressed layers and their parameters", title_justify="left")
    for heading in ("layers", "factors", "ranks", "dense, each", "tensor train"):
        table.add_column(heading, justify="left" if heading in ("factors", "ranks") else "right")
    groups: dict[tuple[tuple[int, ...], ...], list[LayerPlan]] = {}
    for layer in compression:
        groups.setdefault((layer.in_factors, layer.out_factors, layer.ranks), []).append(layer)
    for shape, layers in groups.items():
        in_factors, out_factors, ranks = (" ".join(map(str, sizes)) for sizes in shape)
        counts = f"{layers[0].dense_parameters:,}", f"{layers[0].parameters:,}"
        table.add_row(str(len(layers)), f"{in_factors} -> {out_factors}", ranks, *counts)
    table.add_section()
    table.add_row("", "whole model", "", f"{compression.dense_parameters:,}", f"{compression.parameters:,}")
    Console().print(table)


def compare(
    models: dict[str, PreTrainedModel], dtype: str, dropout: float, optimizer_name: str, rounds: int
) -> Comparison:
    """Time one training step of both models."""
    batch = {
        "input_ids": torch.randint(30522, (SEQUENCES, LENGTH)),
        "attention_mask": torch.ones(SEQUENCES, LENGTH, dtype=torch.long),
        "labels": torch.randint(3, (SEQUENCES,)),
    }
    candidates, saved_bytes = {}, {}
    optimizer_s: dict[str, list[float]] = {form: [] for form in models}
    for form, model in models.items():
        optimizer = make_optimizer(model.train(), optimizer_name if form == TENSOR_TRAIN else "adamw")
        candidates[form] = partial(train_step, model, optimizer, batch, dtype, optimizer_s[form])
        saved_bytes[form] = saved_for_backward(partial(compute_loss, model, batch, dtype), model.parameters())
    timings = time_interleaved(candidates, rounds, label="training step")
    extra: dict[str, str | int | float] = {}
    for form, model in models.items():
        column = form.replace(" ", "_")
        extra[f"{column}_parameters"] = size_report(model).parameters
        extra[f"{column}_tokens_per_s"] = round(SEQUENCES * LENGTH / timings.median(form))
        extra[f"{column}_optimizer_s"] = round(statistics.median(optimizer_s[form]), 4)
    return Comparison(
        case={
            "model": "bert-6x768",
            "optimizer": optimizer_name,
            "dtype": dtype,
            "dropout": dropout,
            "tokens": f"{SEQUENCES}x{LENGTH}",
        },
        timings=timings,
        saved_bytes=saved_bytes,
        promised=PROMISED if dtype == "fp32" else None,
        unit="s",
        extra=extra,
    )


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """TTMuon, or AdamW with the library's groups."""
    if name == "tt_muon":
        return TTMuon(model, 1e-4)
    return torch.optim.AdamW(comera_param_groups(model, 1e-4), lr=1e-4, fused=True)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], dtype: str, optimizer_s: list[float]
) -> None:
    """One whole step; the seconds of the optimizer are appended to ``optimizer_s``."""
    compute_loss(model, batch, dtype).backward()
    start = time.perf_counter()
    optimizer.step()
    optimizer_s.append(time.perf_counter() - start)
    optimizer.zero_grad()


def compute_loss(model: nn.Module, batch: dict[str, Tensor], dtype: str) -> Tensor:
    """The loss of one batch, under autocast for bf16."""
    with torch.autocast("cpu", DTYPES[dtype], enabled=dtype != "fp32"):
        return model(**batch).loss


if __name__ == "__main__":
    main()
