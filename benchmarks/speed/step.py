"""Time a whole training step, tensor train against dense: the six-encoder BERT of the CoMERA paper, or another model.

    python -m benchmarks.speed.step
    python -m benchmarks.speed.step --dropout 0
    python -m benchmarks.speed.step --device cuda --dtype bf16 --graphs --batch 128x128
    python -m benchmarks.speed.step --device cuda --dtype bf16 --graphs --model bert-24x1024 --batch 16x512
    python -m benchmarks.speed.step --device cuda --dtype bf16 --compile --model gpt2-12x768 --batch 8x512
    python -m benchmarks.speed.step --model gpt2-12x768 --batch 8x512 --dropout 0 --embedding_width 128

`--help` says what is compared and how to read the figures.
"""

import argparse
import copy
import dataclasses
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
)

from benchmarks.harness.process import in_own_process
from benchmarks.harness.timing import (
    Comparison,
    benchmark_parser,
    check_agreement,
    positive_integer,
    report,
    saved_for_backward,
)
from hf_comera import (
    ComeraConfig,
    CompressionPlan,
    GraphedStep,
    TTMuon,
    comera_param_groups,
    get_comera_model,
    set_head_and_loss,
    size_report,
)
from hf_comera.compress import LayerPlan
from hf_comera.ops import use_kernels
from hf_comera.ops.cuda.library import kernels_refusal
from loop.measure import DENSE, TENSOR_TRAIN, time_interleaved
from loop.memory import training_peak
from mnli.model import DENSE_PARAMETERS, TARGETS, TENSOR_TRAIN_PARAMETERS, paper_shapes, six_encoders

NARROW_DENSE = "narrow dense"
"""A dense model but for its embedding, which is factorized."""
PAPER, LARGE = "bert-6x768", "bert-24x1024"
MASKED, CAUSAL, DECODER = "roberta-12x768", "gpt2-12x768", "llama-1x4096"
SMALL_MASKED, SMALL_CAUSAL, SMALL_ROTARY = "roberta-4x768", "gpt2-6x768", "llama-8x1024"
TINY_CLASSIFIER, TINY_MASKED, TINY_CAUSAL, TINY_DECODER = "tiny-bert", "tiny-roberta", "tiny-gpt2", "tiny-llama"
MODELS = (PAPER, LARGE, MASKED, SMALL_MASKED, CAUSAL, SMALL_CAUSAL, DECODER, SMALL_ROTARY)
IGNORED, HIDDEN_SHARE = -100, 0.15  # label of a token that is not asked for; share of those that are, as in BERT
_LARGE_SIZES = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
_TINY_SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
_TINY_GPT2 = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 120, "n_positions": 64}
# Of Llama's first model, with few tokens: what is measured is the block, not the head.
_LLAMA_SIZES = {"num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
_LLAMA_SIZES |= {"vocab_size": 512}
# With a vocabulary, whose table is the head's too.
_SMALL_LLAMA = {"vocab_size": 32000, "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16}
_SMALL_LLAMA |= {"intermediate_size": 2816, "tie_word_embeddings": True}
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
COMPILER = "inductor"
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


class _Case(NamedTuple):
    auto_class: Any
    new_config: Callable[[float], PreTrainedConfig]
    """From the dropout."""
    new_shapes: Callable[[], ComeraConfig]


def _bert(**sizes: int) -> Callable[[float], PreTrainedConfig]:
    return lambda dropout: six_encoders(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes)


def _roberta(**sizes: int) -> Callable[[float], PreTrainedConfig]:
    return lambda dropout: RobertaConfig(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, max_position_embeddings=514, **sizes
    )


def _gpt2(**sizes: int) -> Callable[[float], PreTrainedConfig]:
    return lambda dropout: GPT2Config(
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, **sizes
    )


def _llama(**sizes: int) -> Callable[[float], PreTrainedConfig]:
    return lambda _: LlamaConfig(use_cache=False, **sizes)


_CASES = {
    PAPER: _Case(AutoModelForSequenceClassification, _bert(), paper_shapes),
    LARGE: _Case(
        AutoModelForSequenceClassification,
        _bert(**_LARGE_SIZES),
        lambda: ComeraConfig(rank=64, target_modules=TARGETS),
    ),
    MASKED: _Case(AutoModelForMaskedLM, _roberta(vocab_size=50265), lambda: ComeraConfig(rank=32)),
    SMALL_MASKED: _Case(
        AutoModelForMaskedLM, _roberta(vocab_size=50265, num_hidden_layers=4), lambda: ComeraConfig(rank=32)
    ),
    CAUSAL: _Case(AutoModelForCausalLM, _gpt2(), lambda: ComeraConfig(rank=32)),
    SMALL_CAUSAL: _Case(AutoModelForCausalLM, _gpt2(n_layer=6), lambda: ComeraConfig(rank=32)),
    SMALL_ROTARY: _Case(AutoModelForCausalLM, _llama(**_SMALL_LLAMA), lambda: ComeraConfig(rank=32)),
    DECODER: _Case(AutoModelForCausalLM, _llama(**_LLAMA_SIZES), lambda: ComeraConfig(rank=64)),
    # For tests, and for rehearsals of the GPU report.
    TINY_CLASSIFIER: _Case(
        AutoModelForSequenceClassification, _bert(vocab_size=120, **_TINY_SIZES), lambda: ComeraConfig(rank=4)
    ),
    TINY_MASKED: _Case(AutoModelForMaskedLM, _roberta(vocab_size=120, **_TINY_SIZES), lambda: ComeraConfig(rank=4)),
    TINY_CAUSAL: _Case(AutoModelForCausalLM, _gpt2(**_TINY_GPT2), lambda: ComeraConfig(rank=4)),
    TINY_DECODER: _Case(AutoModelForCausalLM, _llama(vocab_size=512, **_TINY_SIZES), lambda: ComeraConfig(rank=4)),
}


def build_models(name: str, dropout: float, embedding_width: int | None = None) -> dict[str, PreTrainedModel]:
    """The tensor-train model, and the dense one that computes the same; with a width, a dense one that has it too.

    Raises:
        RuntimeError: If a model has not as many parameters as it should, or the logits of the two differ.
    """
    case = _CASES[name]
    config = case.new_config(dropout)
    shapes = dataclasses.replace(case.new_shapes(), embedding_width=embedding_width)
    tensor_train = get_comera_model(case.auto_class, shapes, config=config)
    models = {DENSE: copy.deepcopy(tensor_train).merge_and_unload(), TENSOR_TRAIN: tensor_train}
    if embedding_width is not None:
        embedding = next(layer.name for layer in tensor_train.comera_plan() if layer.width is not None)
        narrow = ComeraConfig(target_modules=[embedding], embedding_width=embedding_width)
        models[NARROW_DENSE] = get_comera_model(copy.deepcopy(models[DENSE]), narrow)
    if name == PAPER:
        _check_sizes(models)
    ids = torch.randint(config.vocab_size, (2, 16))
    with torch.no_grad():
        logits = {form: model.eval()(input_ids=ids).logits for form, model in models.items()}
    for found in logits.values():
        check_agreement("logits", found, logits[DENSE], 1e-4)
    return models


def random_ids(name: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids for a model, and labels as its task has them: classes, some of the tokens, or all of them."""
    case = _CASES[name]
    config = case.new_config(0.0)
    ids = torch.randint(config.vocab_size, (rows, length))
    if case.auto_class is AutoModelForSequenceClassification:
        return ids, torch.randint(config.num_labels, (rows,))
    if case.auto_class is AutoModelForMaskedLM:
        return ids, ids.masked_fill(torch.rand(ids.shape) >= HIDDEN_SHARE, IGNORED)
    return ids, ids


def _check_sizes(models: dict[str, PreTrainedModel]) -> None:
    for form, expected in ((TENSOR_TRAIN, TENSOR_TRAIN_PARAMETERS), (DENSE, DENSE_PARAMETERS)):
        found = size_report(models[form]).parameters
        if found != expected:
            raise RuntimeError(
                f"The {form} model has {found:,} parameters instead of {expected:,}: its factors or ranks are others."
            )


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


@dataclass
class Step:
    """Forward, backward, optimizer and zero_grad on one batch; a call returns when all of it is done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, Tensor]
    dtype: str
    optimizer_s: list[float] = field(default_factory=list)
    """Seconds of the optimizer, one for each plain step on a CPU; elsewhere it is not timed on its own."""
    compiled: Callable[..., Any] | None = None
    """The model as ``torch.compile`` made it, which runs in its place."""

    def __call__(self) -> None:
        """One plain step."""
        self.loss().backward()
        start = time.perf_counter()
        self.optimizer.step()
        if self.device.type == "cpu":
            self.optimizer_s.append(time.perf_counter() - start)
        self.optimizer.zero_grad()
        wait_for(self.device)

    def loss(self) -> Tensor:
        """The loss of the batch, under autocast for bf16."""
        with torch.autocast(self.device.type, DTYPES[self.dtype], enabled=self.dtype == "bf16"):
            return (self.model if self.compiled is None else self.compiled)(**self.batch).loss

    def as_graph(self) -> Callable[[], None]:
        """The same as one replay of a CUDA graph.

        Raises:
            RuntimeError: If the step cannot be recorded.
        """
        graphed = GraphedStep(self.model, self.optimizer, compute_loss=lambda _: self.loss())

        def step() -> None:
            graphed(self.batch)
            wait_for(self.device)

        for _ in range(graphed.num_warmup_steps + 1):
            step()
        if graphed.num_replays == 0:
            raise RuntimeError(f"no CUDA graph: {graphed.reason}. Leave --graphs out to time plain steps.")
        return step

    @property
    def device(self) -> torch.device:
        """Where the batch lies."""
        return self.batch["input_ids"].device


@dataclass(frozen=True)
class PreparedStep:
    """A step that is ready to be timed."""

    run: Callable[[], None]
    saved_bytes: int
    """Kept by autograd from forward to backward."""
    peak_bytes: int | None
    """The most GPU memory that the model, its optimizer and its steps take; None on a CPU."""
    plain: Step

    @property
    def optimizer_s(self) -> float | None:
        """Median seconds of the optimizer, where it was timed on its own."""
        return statistics.median(self.plain.optimizer_s) if self.plain.optimizer_s else None


def prepare_step(
    model: nn.Module, optimizer: str, batch: dict[str, Tensor], *, dtype: str, graphs: bool, compiled: bool = False
) -> PreparedStep:
    """Move the model to where the batch lies, and measure what it takes there.

    Args:
        model: On a CPU.
        optimizer: ``"tt_muon"`` or ``"adamw"``.
        batch: Arguments of the model.
        dtype: A key of ``DTYPES``.
        graphs: Whether the step is to be a CUDA graph.
        compiled: Whether ``torch.compile`` is to make the model's forward and backward; what autograd saves is counted
            without it, where tensors can be told apart.
    """
    device = batch["input_ids"].device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = model.to(device).train()
    step = Step(model, make_optimizer(model, optimizer), batch, dtype)
    saved_bytes = saved_for_backward(step.loss, model.parameters())
    if compiled:
        step.compiled = torch.compile(model, backend=COMPILER)
        step()  # compiles; a graph is recorded of what this left
    if device.type != "cuda":
        return PreparedStep(step, saved_bytes, None, step)
    torch.cuda.reset_peak_memory_stats(device)
    run = step.as_graph() if graphs else step  # a replay allocates nothing: the peak is that of the recording
    for _ in range(3):
        run()
    return PreparedStep(run, saved_bytes, torch.cuda.max_memory_allocated(device) - before, step)


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """TTMuon, or AdamW with the library's groups."""
    if name == "tt_muon":
        return TTMuon(model, 1e-4)
    return torch.optim.AdamW(comera_param_groups(model, 1e-4), lr=1e-4, fused=True)


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
