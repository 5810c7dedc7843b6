"""Time a whole training step of a TTM embedding against one of nn.Embedding: lookup, backward, fused AdamW.

    python -m benchmarks.speed.lookup

`--help` says what is compared and how to read the figures.
"""

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness.process import in_own_process
from benchmarks.harness.timing import Comparison, benchmark_parser, check_agreement, report, saved_for_backward
from hf_comera.modules import TTMEmbedding
from loop.measure import DENSE, TENSOR_TRAIN, time_interleaved
from loop.memory import training_peak

DESCRIPTION = """\
Lookup, backward and a step of fused AdamW for a TTMEmbedding and for
nn.Embedding with the same table, in turns, in float32: 30522 x 768 as in BERT,
factors and ranks those of the six-encoder BERT of the CoMERA paper.

How often ids repeat decides the cost, so there are two batches of 32 x 128 ids,
both synthetic (seed 0). Ids follow Zipf's law: id k has a probability
proportional to 1/k, as words of running text have in a vocabulary ordered by
frequency. "text" has only such ids; in "padded" each sequence has 16 to 64 of
them, and the padding id fills it up to 128.

Before anything is timed, both must give equal rows. Saved bytes include the ids; peak
bytes leave out the gradient that is given.
"""
VOCABULARY, HIDDEN, PADDING_ID = 30522, 768, 0
SEQUENCES, LENGTH = 32, 128
PROMISED = {"text": 1.5, "padded": 2.5}


def main() -> None:
    """Measure both batches, print the table, write the rows."""
    args = benchmark_parser(DESCRIPTION, rounds=101).parse_args()
    torch.set_num_threads(args.threads)
    comparisons = [compare(name, ids, args.rounds, args.threads) for name, ids in draw_batches().items()]
    title = f"Embedding {VOCABULARY} x {HIDDEN}, lookup + backward + fused AdamW, {SEQUENCES * LENGTH} ids, fp32"
    report(title, comparisons, save_as=None if args.no_save else "bench_lookup")


def draw_batches() -> dict[str, Tensor]:
    """The same ids each time."""
    torch.manual_seed(0)
    return {"text": zipf_ids(), "padded": padded(zipf_ids())}


def zipf_ids() -> Tensor:
    """``(SEQUENCES, LENGTH)`` ids, id k (from 1: 0 is the padding) with a probability proportional to 1/k."""
    weights = 1.0 / torch.arange(1, VOCABULARY, dtype=torch.float64)
    return 1 + torch.multinomial(weights, SEQUENCES * LENGTH, replacement=True).view(SEQUENCES, LENGTH)


def padded(ids: Tensor) -> Tensor:
    """``ids`` where only the first 16 to 64 of each sequence are left."""
    lengths = torch.randint(16, 65, (SEQUENCES, 1))
    return ids.masked_fill(torch.arange(LENGTH) >= lengths, PADDING_ID)


def compare(batch: str, ids: Tensor, rounds: int, threads: int) -> Comparison:
    """Time one batch."""
    tables = build_twins()
    gradient = torch.randn(*ids.shape, HIDDEN)
    with torch.no_grad():
        check_agreement(f"rows of batch {batch!r}", tables[TENSOR_TRAIN](ids), tables[DENSE](ids), 1e-5)
    candidates, saved_bytes = {}, {}
    for form, table in tables.items():
        candidates[form] = partial(train_step, table, make_optimizer(table), ids, gradient)
        saved_bytes[form] = saved_for_backward(partial(table, ids), table.parameters())
    return Comparison(
        case={"batch": batch, "ids": ids.numel()},
        timings=time_interleaved(candidates, rounds, label=batch),
        saved_bytes=saved_bytes,
        peak_bytes={form: in_own_process(threads, peak, batch, form) for form in tables},
        promised=PROMISED[batch],
        extra={"distinct_ids": ids.unique().numel()},
    )


def peak(batch: str, form: str) -> int | None:
    """The most memory that one form takes, for a process of its own."""
    ids, table = draw_batches()[batch], build_twins()[form]
    optimizer, gradient = make_optimizer(table), torch.randn(*ids.shape, HIDDEN)
    return training_peak(partial(train_step, table, optimizer, ids, gradient), table, [optimizer])


def make_optimizer(table: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW."""
    return torch.optim.AdamW(table.parameters(), lr=1e-4, fused=True)


def train_step(table: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, gradient: Tensor) -> None:
    """One lookup, its backward, one update."""
    table(ids).backward(gradient)
    optimizer.step()
    optimizer.zero_grad()


def build_twins() -> dict[str, nn.Module]:
    """A TTM embedding with random cores, and the dense embedding with the same table."""
    tensor_train = TTMEmbedding(
        VOCABULARY,
        HIDDEN,
        in_factors=(16, 20, 10, 10),
        out_factors=(4, 4, 8, 6),
        ranks=32,
        padding_idx=PADDING_ID,
    )
    table = tensor_train.dense().detach()
    dense = nn.Embedding.from_pretrained(table, freeze=False, padding_idx=PADDING_ID)
    return {DENSE: dense, TENSOR_TRAIN: tensor_train}


if __name__ == "__main__":
    main()
