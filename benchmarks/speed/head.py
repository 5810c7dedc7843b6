"""Time head and loss of a language model: whole logits against chunks of labelled tokens, dense and TTM tables.

    python -m benchmarks.speed.head

`--help` says what is compared and how to read the figures.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from benchmarks.harness.process import in_own_process
from benchmarks.harness.timing import Comparison, benchmark_parser, check_agreement, positive_integer, report
from hf_comera.modules import TTMEmbedding
from hf_comera.ops import ttm_project
from hf_comera.ops.fused_loss import IGNORED, head_cross_entropy
from loop.measure import DENSE, TENSOR_TRAIN, time_interleaved
from loop.memory import training_peak

DESCRIPTION = """\
Loss and gradients of a head 768 wide, by default of 50265 words as RoBERTa's
and for 2048 tokens, in float32. "dense" makes the logits of all tokens of a dense table, as
models of Transformers do. "tensor train" has a TTM table of rank 30 and makes
logits of labelled tokens only, a chunk at a time.

Beside them stand a dense table in chunks (dense_chunks_s) and a TTM table with
whole logits (tensor_train_whole_s), timed in the same turns. 15 % of the tokens
have a label, as in masked language models, or all, as in causal ones.

Before anything is timed, losses and gradients of the hidden states must agree.
"""
WIDTH = 768
CHUNKS, WHOLE = "dense, chunks", "tensor train, whole"
Head = Callable[[Tensor, Tensor], Tensor]


class Size(NamedTuple):
    """One case."""

    vocabulary: int
    tokens: int
    labelled_percent: int


def main() -> None:
    """Measure both shares of labels, print the table, write the rows."""
    parser = benchmark_parser(DESCRIPTION, rounds=5)
    parser.add_argument("--vocabulary", type=positive_integer, default=50265, help="words; default %(default)s")
    parser.add_argument("--tokens", type=positive_integer, default=2048, help="default %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    comparisons = [compare(Size(args.vocabulary, args.tokens, share), args) for share in (15, 100)]
    title = f"Head and loss, {args.vocabulary} x {WIDTH}, {args.tokens} tokens, fp32"
    report(title, comparisons, save_as=None if args.no_save else "bench_head")


def draw_batch(size: Size) -> tuple[Tensor, Tensor]:
    """Hidden states and labels, the same each time."""
    torch.manual_seed(0)
    labels = torch.randint(size.vocabulary, (size.tokens,))
    hidden = torch.randn(size.tokens, WIDTH, requires_grad=True)
    return hidden, labels.masked_fill(torch.rand(size.tokens) * 100 >= size.labelled_percent, IGNORED)


def build_heads(vocabulary: int) -> dict[str, tuple[nn.Module, Head]]:
    """The four ways, each with what it trains; all have the same table."""
    torch.manual_seed(0)
    table = TTMEmbedding(vocabulary, WIDTH, ranks=30)
    table.draw(0.02)
    dense = nn.Linear(WIDTH, vocabulary, bias=False)
    dense.weight = nn.Parameter(table.dense().detach())
    return {
        DENSE: (dense, lambda x, y: cross_entropy(linear(x, dense.weight), y, ignore_index=IGNORED, reduction="sum")),
        TENSOR_TRAIN: (table, lambda x, y: head_cross_entropy(x, table.dense(), None, y)),
        CHUNKS: (dense, lambda x, y: head_cross_entropy(x, dense.weight, None, y)),
        WHOLE: (table, lambda x, y: cross_entropy(ttm_project(x, table.cores(), vocabulary), y, reduction="sum")),
    }


def step(head: Head, module: nn.Module, hidden: Tensor, labels: Tensor) -> None:
    """Loss and all gradients, which are let go of."""
    head(hidden, labels).backward()
    hidden.grad = None
    module.zero_grad()


def compare(size: Size, args: argparse.Namespace) -> Comparison:
    """Time one share of labels."""
    hidden, labels = draw_batch(size)
    heads = build_heads(size.vocabulary)
    (expected,) = torch.autograd.grad(heads[DENSE][1](hidden, labels), hidden)
    for name, (_, head) in heads.items():
        (found,) = torch.autograd.grad(head(hidden, labels), hidden)
        check_agreement(f"gradients of {name!r}", found, expected, 1e-4)
    candidates = {name: partial(step, head, module, hidden, labels) for name, (module, head) in heads.items()}
    timings = time_interleaved(candidates, args.rounds, label=f"{size.labelled_percent} %")
    return Comparison(
        case=size._asdict(),
        timings=timings,
        saved_bytes=None,
        peak_bytes={form: in_own_process(args.threads, peak, size, form) for form in (DENSE, TENSOR_TRAIN)},
        promised=None,
        extra={
            "dense_chunks_s": round(timings.median(CHUNKS), 3),
            "tensor_train_whole_s": round(timings.median(WHOLE), 3),
        },
        unit="s",
    )


def peak(size: Size, form: str) -> int | None:
    """The most memory that one form takes, for a process of its own."""
    hidden, labels = draw_batch(size)
    module, head = build_heads(size.vocabulary)[form]
    return training_peak(partial(step, head, module, hidden, labels), module)


if __name__ == "__main__":
    main()
