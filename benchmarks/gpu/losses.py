"""Step "losses" of the GPU report: models, losses and padded batches of both training scripts, in every way of a step.

A way is plain steps, CUDA graphs, kernels, or both. All ways start from the same weights and see the same generated
batches, so without dropout their losses must be those of plain steps.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, PreTrainedModel, RobertaConfig

from benchmarks.gpu.worker import Cases, Row
from benchmarks.speed.step import wait_for
from codebert.masking import Masking
from hf_comera import ComeraConfig, GraphedStep, TTMuon, get_comera_model
from hf_comera.ops import use_kernels
from mnli.model import paper_shapes, six_encoders

__all__ = ["run"]

WAYS = ("eager", "graphs", "kernels", "graphs and kernels")
TOLERANCES = {"fp32": 2e-3, "bf16": 3e-2}
"""Of each loss, relative to that of plain steps."""
RATE, NORM, SPECIAL_IDS = 5e-4, 1.0, (0, 1, 2, 3, 4)
BUCKETS = {False: (64, 128), True: (8, 16)}
"""Lengths that graphs pad to, by whether models are tiny."""
ROWS = {False: 32, True: 2}
TINY = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
Batch = dict[str, Tensor]


class Script(NamedTuple):
    """What of a training script is run."""

    build: Callable[[bool, float], PreTrainedModel]
    """From whether it is tiny, and the dropout."""
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[Masking, list[list[int]], int], Batch]


def pairs_model(tiny: bool, dropout: float) -> PreTrainedModel:
    """Of train_mnli.py."""
    sizes: dict[str, Any] = TINY | {"vocab_size": 120} if tiny else {}
    config = six_encoders(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes)
    shapes = ComeraConfig(rank=4) if tiny else paper_shapes()
    return get_comera_model(AutoModelForSequenceClassification, shapes, config=config)


def code_model(tiny: bool, dropout: float) -> PreTrainedModel:
    """Of pretrain_codebert.py with the sizes of CodeBERT."""
    sizes: dict[str, Any] = TINY | {"vocab_size": 120} if tiny else {"vocab_size": 50265}
    config = RobertaConfig(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, max_position_embeddings=514, **sizes
    )
    return get_comera_model(AutoModelForMaskedLM, ComeraConfig(rank=4 if tiny else 32), config=config)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """That of the model."""
    return model(**batch).loss  # type: ignore[no-any-return]


def pairs_batch(masking: Masking, sequences: list[list[int]], number: int) -> Batch:
    """Two sentences a row, the second from the middle on, and a class."""
    batch = masking.batch(sequences, number)
    ids, mask = torch.where(batch["labels"] >= 0, batch["labels"], batch["input_ids"]), batch["attention_mask"]
    segments = (torch.arange(ids.shape[1]) >= ids.shape[1] // 2).long() * mask
    return {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask, "labels": ids[:, 1] % 3}


def code_batch(masking: Masking, sequences: list[list[int]], number: int) -> Batch:
    """Hidden tokens, with the numbers of the script."""
    return masking.batch(sequences, number)


SCRIPTS = {
    "train_mnli": Script(pairs_model, own_loss, pairs_batch),
    "pretrain_codebert": Script(code_model, own_loss, code_batch),
}


def run(cases: Cases) -> None:
    """All ways, exact ones first; then with dropout, whose losses are compared with nothing."""
    for dtype, name, way in product(TOLERANCES, SCRIPTS, WAYS):
        cases.run(f"{name}, {dtype}, {way}", partial(measure, cases, name, dtype, way, 0.0))
    for name in SCRIPTS:
        cases.run(f"{name}, bf16, graphs, dropout", partial(measure, cases, name, "bf16", "graphs", 0.1))


def measure(cases: Cases, name: str, dtype: str, way: str, dropout: float) -> list[Row]:
    """Train; losses must be finite, and without dropout those of plain steps.

    Raises:
        RuntimeError: If they are not.
    """
    tiny, num_steps = cases.settings["tiny"], cases.settings["steps"]
    script, device = SCRIPTS[name], torch.device(cases.device)
    torch.manual_seed(0)
    model = script.build(tiny, dropout).to(device).train()
    batches = [generated(script, model.config.vocab_size, tiny, number) for number in range(num_steps)]
    use_kernels("kernels" in way)
    try:
        losses, seconds, graphed = train(model, script, batches, dtype, "graphs" in way)
    finally:
        use_kernels(False)
    row = {
        "script": name, "dtype": dtype, "way": way, "dropout": dropout, "losses": losses,
        "step_ms": round(statistics.median(seconds[num_steps // 2 :]) * 1e3, 3),
        "replays": graphed.num_replays if graphed else 0,
        "not_in_graphs": dict(graphed.eager_steps) if graphed else {},
    }  # fmt: skip
    if not np.isfinite(losses).all():
        raise RuntimeError(f"losses are not finite: {losses}")
    if way != "eager" and not dropout:
        row["difference"] = compare(cases, row)
    return [row]


def compare(cases: Cases, row: Row) -> float:
    """The largest relative difference from the losses of plain steps.

    Raises:
        RuntimeError: If it is too large, or there are none to compare with.
    """
    same = [
        other for other in cases.journal.rows(cases.step.name)
        if all(other[key] == row[key] for key in ("script", "dtype", "dropout")) and other["way"] == "eager"
    ]  # fmt: skip
    if not same:
        raise RuntimeError("there are no losses of plain steps to compare with")
    expected, found = np.array(same[0]["losses"]), np.array(row["losses"])
    difference = float(np.max(np.abs(found - expected) / np.abs(expected)))
    if not difference <= TOLERANCES[row["dtype"]]:
        raise RuntimeError(f"losses differ by {difference:.2g} from those of plain steps: {row['losses']}")
    return round(difference, 7)


def generated(script: Script, vocabulary: int, tiny: bool, number: int) -> Batch:
    """A padded batch; sequences of every other batch are short."""
    random = np.random.default_rng([7, number])
    longest = BUCKETS[tiny][number % 2]
    lengths = random.integers(longest // 2 + 1, longest + 1, ROWS[tiny])
    masking = Masking(
        probability=0.3, mask_id=SPECIAL_IDS[-1], pad_id=1, special_ids=SPECIAL_IDS, vocab_size=vocabulary, seed=0
    )
    sequences = [[0, *random.integers(len(SPECIAL_IDS), vocabulary, length - 2).tolist(), 2] for length in lengths]
    return script.batch(masking, sequences, number)


def train(
    model: PreTrainedModel, script: Script, batches: list[Batch], dtype: str, graphs: bool
) -> tuple[list[float], list[float], GraphedStep | None]:
    """As the scripts do, with TTMuon, clipping and a warm-up: losses and seconds of each step."""
    device = next(model.parameters()).device
    optimizer = TTMuon(model, RATE)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (len(batches) // 4)))

    def loss_of(batch: Batch) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
            return script.loss(model, batch)

    def plainly(batch: Batch) -> Tensor:
        loss = loss_of({name: tensor.to(device) for name, tensor in batch.items()})
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    tiny = len(batches[0]["input_ids"]) == ROWS[True]
    graphed = None
    if graphs:
        pad_values = {"token_type_ids": 0}
        graphed = GraphedStep(
            model, optimizer, buckets=BUCKETS[tiny], max_grad_norm=NORM, compute_loss=loss_of, pad_values=pad_values
        )
    losses, seconds = [], []
    for batch in batches:
        start = time.perf_counter()
        loss = (graphed or plainly)(batch)
        scheduler.step()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
        losses.append(round(loss.float().item(), 6))
    return losses, seconds, graphed
