"""Time a whole training step, tensor train against dense: the six-encoder BERT of the CoMERA paper, or another model.

    python scripts/bench_step.py
    python scripts/bench_step.py --dropout 0
    python scripts/bench_step.py --device cuda --dtype bf16 --graphs --batch 128x128
    python scripts/bench_step.py --device cuda --dtype bf16 --graphs --model bert-24x1024 --batch 16x512
    python scripts/bench_step.py --device cuda --dtype bf16 --compile --model gpt2-12x768 --batch 8x512
    python scripts/bench_step.py --model gpt2-12x768 --batch 8x512 --dropout 0 --embedding_width 128

`--help` says what is compared and how to read the figures.
"""

import argparse
import re

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_comera import set_head_and_loss, size_report
from hf_comera.ops import use_kernels
from hf_comera.ops.cuda.library import kernels_refusal
from interleaved_timing import (
    DENSE,
    TENSOR_TRAIN,
    Comparison,
    benchmark_parser,
    positive_integer,
    report,
    time_interleaved,
)
from own_process import in_own_process
from step_models import IGNORED, LARGE, MODELS, NARROW_DENSE, PAPER, build_models, print_plan, random_ids
from step_timing import DTYPES, PreparedStep, prepare_step
from training_size import training_peak

DESCRIPTION = """\
Forward, backward, optimizer and zero_grad on random tokens, in tensor-train
form and dense, in turns. bert-6x768 is a classifier of six layers (hidden size
768, 12 heads, FFN 3072, 30522 tokens, 3 labels) with the factors and ranks of
the CoMERA paper's experiment on MNLI; bert-24x1024 has 24 (1024, 16 heads, FFN
4096) and ranks of 64. roberta-12x768 predicts 15 % of its tokens, gpt2-12x768
the next one (ranks of 32); llama-1x4096 is one block of a decoder (4096, FFN
11008, ranks of 64) with few tokens. The plan is printed first. The
optimizer is fused AdamW for the dense model and TTMuon for the other;
--optimizer adamw gives both AdamW. The dense model is the merged tensor-train
one: both must give equal logits before anything is timed.

With --embedding_width both word embedding and tied head of the tensor train go
through a narrow table. A third model, dense but for the same narrow table, with
head and loss as one block, then takes its turns too: narrow_dense in the row.

With dropout the dense model draws as torch does, in one thread on a CPU, and
the tensor train draws several entries at a time: compare --dropout 0. On a GPU,
plain steps are bound by launches; with --graphs both models run as CUDA graphs,
and with --compile both are compiled by torch.compile.
The peak on a GPU is all memory that a form takes there, its graph included.

Batches have no padding, and on a GPU no mask, so attention may take its fastest
kernel. With --padded rows are from half as long to full, and a mask is given, as
in training on real text; a graph then always holds the mask of all places, and
tokens a second are those without padding.
"""
# How many times faster: by model, batch, dtype, dropout, device, and whether both steps are CUDA graphs.
PROMISED = {
    (PAPER, "32x128", "fp32", 0.1, "cpu", False): 3.8,
    (PAPER, "32x128", "fp32", 0.0, "cpu", False): 5.2,
    (PAPER, "32x128", "bf16", 0.1, "cpu", False): 2.7,
    (PAPER, "32x128", "bf16", 0.1, "cuda", True): 3.0,
    (PAPER, "128x128", "bf16", 0.1, "cuda", True): 2.7,
    (LARGE, "16x512", "bf16", 0.1, "cuda", True): 2.5,
}


def main() -> None:
    """Build both models, measure the step, print the table, write the row."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if args.dtype == "tf32" else "ieee"
    torch.manual_seed(0)
    models = build_models(args.model, args.dropout, args.embedding_width)
    print_plan(models[TENSOR_TRAIN].comera_plan())
    use_kernels(args.kernels)
    comparison = compare(models, args)
    title = f"Training step of {args.model}, {args.batch} tokens"
    report(title, [comparison], save_as=None if args.no_save else "bench_step")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = benchmark_parser(DESCRIPTION, rounds=15)
    parser.add_argument("--model", choices=MODELS, default=PAPER, help="default %(default)s")
    parser.add_argument(
        "--batch", default="32x128", metavar="ROWSxTOKENS", help="rows and tokens a row; default %(default)s"
    )
    parser.add_argument("--padded", action="store_true", help="rows from half to full length, with a mask")
    parser.add_argument("--dropout", type=float, default=0.1, help="of hidden states and attention; default 0.1")
    parser.add_argument(
        "--optimizer", choices=("tt_muon", "adamw"), default="tt_muon", help="of the tensor train; default tt_muon"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="fp32",
        help="bf16: under autocast, parameters stay fp32; tf32: fp32 with products in tf32; default fp32",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument(
        "--graphs", action="store_true", help="steps of both models as CUDA graphs; needs --device cuda"
    )
    parser.add_argument("--compile", action="store_true", help="both models through torch.compile")
    parser.add_argument(
        "--kernels", action="store_true", help="the tensor train takes our CUDA kernels; needs --device cuda"
    )
    parser.add_argument(
        "--dense_block", action="store_true", help="head and loss of the dense language model as one block too"
    )
    parser.add_argument("--embedding_width", type=positive_integer, help="of a narrow table, also in a dense model")
    args = parser.parse_args()
    check_arguments(parser, args)
    return args


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what is no batch, and what this machine cannot do."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", args.batch):
        parser.error(f"--batch {args.batch} is not ROWSxTOKENS, such as 32x128")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    if args.device == "cpu" and (args.graphs or args.kernels or args.dtype == "tf32"):
        parser.error("--graphs, --kernels and --dtype tf32 need --device cuda")
    if args.dense_block and args.model in (PAPER, LARGE):
        parser.error(f"--dense_block is for language models, and {args.model} is a classifier")
    if args.embedding_width and args.model in (PAPER, LARGE):
        parser.error(f"--embedding_width is for language models, and {args.model} is a classifier")
    if args.kernels and (reason := kernels_refusal(torch.device("cuda", 0))):
        parser.error(f"--kernels: {reason}")


def compare(models: dict[str, PreTrainedModel], args: argparse.Namespace) -> Comparison:
    """Time one training step of both models."""
    batch = random_batch(args.batch, torch.device(args.device), args.model, args.padded)
    prepared = {form: prepare(form, model, batch, args) for form, model in models.items()}
    timings = time_interleaved({form: ready.run for form, ready in prepared.items()}, args.rounds, label="step")
    tokens = int(batch["attention_mask"].sum()) if args.padded else batch["input_ids"].numel()
    extra = {}
    for form, ready in prepared.items():
        column = form.replace(" ", "_")
        extra[f"{column}_parameters"] = size_report(models[form]).parameters
        extra[f"{column}_tokens_per_s"] = round(tokens / timings.median(form))
        extra[f"{column}_optimizer_s"] = "" if ready.optimizer_s is None else round(ready.optimizer_s, 4)
    peak_bytes = {
        form: ready.peak_bytes if args.device == "cuda" else in_own_process(args.threads, peak, form, args)
        for form, ready in prepared.items()
    }
    if NARROW_DENSE in prepared:
        extra |= {
            "narrow_dense_step_s": round(timings.median(NARROW_DENSE), 4),
            "ratio_to_narrow_dense": round(timings.ratio(TENSOR_TRAIN, NARROW_DENSE), 2),
            "narrow_dense_saved_bytes": prepared[NARROW_DENSE].saved_bytes,
            "narrow_dense_peak_bytes": peak_bytes[NARROW_DENSE] or "",
        }
    return Comparison(
        case=case_of(args),
        timings=timings,
        saved_bytes={form: ready.saved_bytes for form, ready in prepared.items()},
        peak_bytes=peak_bytes,
        promised=promised(args),
        unit="s" if args.device == "cpu" else "ms",
        extra=extra,
    )


def promised(args: argparse.Namespace) -> float | None:
    """The speed-up that is promised for a case, if one is."""
    if args.compile or args.padded or args.dense_block or args.embedding_width:
        return None
    return PROMISED.get((args.model, args.batch, args.dtype, args.dropout, args.device, args.graphs))


def prepare(form: str, model: PreTrainedModel, batch: dict[str, Tensor], args: argparse.Namespace) -> PreparedStep:
    """The step of one form."""
    optimizer = args.optimizer if form == TENSOR_TRAIN else "adamw"
    if form == DENSE and args.dense_block:
        set_head_and_loss(model)
    return prepare_step(model, optimizer, batch, dtype=args.dtype, graphs=args.graphs, compiled=args.compile)


def peak(form: str, args: argparse.Namespace) -> int | None:
    """The most memory that one form takes on a CPU, for a process of its own."""
    model = build_models(args.model, args.dropout, args.embedding_width)[form]
    batch = random_batch(args.batch, torch.device(args.device), args.model, args.padded)
    step = prepare(form, model, batch, args).plain
    return training_peak(step, step.model, [step.optimizer])


def random_batch(size: str, device: torch.device, model: str = PAPER, padded: bool = False) -> dict[str, Tensor]:
    """Random tokens. On a GPU only padded rows have a mask: without one, attention may take its fastest kernel."""
    rows, length = map(int, size.split("x"))
    ids, labels = random_ids(model, rows, length)
    batch = {"input_ids": ids, "labels": labels}
    if padded or device.type == "cpu":
        lengths = torch.linspace(length / 2 if padded else length, length, rows).ceil().unsqueeze(1)
        is_token = torch.arange(length) < lengths
        batch |= {"attention_mask": is_token.long(), "input_ids": ids.masked_fill(~is_token, 0)}
        if labels.ndim == 2:
            batch["labels"] = labels.masked_fill(~is_token, IGNORED)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def case_of(args: argparse.Namespace) -> dict[str, str | int | float]:
    """What names the row, besides the machine; what was not used is left empty, as in rows from before."""
    return {
        "model": args.model,
        "optimizer": args.optimizer,
        "dtype": args.dtype,
        "dropout": args.dropout,
        "tokens": args.batch,
        "gpu": "" if args.device == "cpu" else torch.cuda.get_device_name(),
        "graphs": "yes" if args.graphs else "",
        "kernels": "yes" if args.kernels else "",
        "compiled": "yes" if args.compile else "",
        "padded": "yes" if args.padded else "",
        "dense_block": "yes" if args.dense_block else "",
        "embedding_width": args.embedding_width or "",
    }


if __name__ == "__main__":
    main()
