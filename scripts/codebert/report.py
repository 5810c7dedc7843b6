"""The finished model: saved, reloaded, measured, shown in tables and a picture, described by a card, published."""

import dataclasses
import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

import hf_comera
from codebert.model import dense_twin
from codebert.run import History, Run
from codebert.settings import Settings
from codebert.speed import SpeedComparison, compare_speed
from codebert.tokens import bimodal_ids
from hf_comera import SizeReport
from loop.measure import machine
from loop.outcome import describe_machine, write_whole

_NAME = re.compile(r"[A-Za-z_]\w{2,}")


@dataclass(frozen=True)
class FilledMask:
    """One function with a hidden name, and what the model puts there."""

    docstring: str
    code: str
    """The code the model saw, with the mask in it."""
    name: str
    guesses: list[tuple[str, float]]
    """Most probable tokens with their probabilities, best first."""


def fill_masks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    functions: Dataset,
    *,
    max_seq_length: int,
    wanted: int = 3,
    num_guesses: int = 5,
) -> list[FilledMask]:
    """Take functions spread evenly over ``functions``, hide the last use of a name, and ask the model for it.

    The choice looks at the text only, never at the model's answer. Text without code gives an empty list.
    """
    if "code" not in functions.column_names or not len(functions):
        return []
    filled = []
    for part in range(wanted):
        first, end = part * len(functions) // wanted, (part + 1) * len(functions) // wanted
        rows = (functions[row] for row in range(first, end))
        found = next(filter(None, (_hide_name(row, tokenizer, max_seq_length) for row in rows)), None)
        if found is not None:
            filled.append(_guess(model, tokenizer, *found, num_guesses))
    return filled


def _hide_name(
    row: dict[str, str], tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> tuple[dict[str, str], list[int], int] | None:
    """The function, its token ids and the place of a name to hide; None if it has no name that is one token.

    The name must occur in the code at least twice, so that a reader could guess it as well.
    """
    (ids,) = bimodal_ids([row["docstring"]], [row["code"]], tokenizer, max_seq_length)
    code_start = ids.index(tokenizer.sep_token_id) + 1
    words = [tokenizer.decode([token]).strip() for token in ids[code_start:-1]]
    texts = [tokenizer.decode([token]) for token in ids[code_start:-1]]
    for place in reversed(range(1, len(words) - 1)):
        name = words[place]
        if not _NAME.fullmatch(name) or keyword.iskeyword(name) or words.count(name) < 2:
            continue
        # A token may be a piece of a longer name: its neighbours tell.
        starts = texts[place] != name or not re.search(r"\w$", texts[place - 1])
        if starts and not re.match(r"\w", texts[place + 1]):
            return row, ids, code_start + place
    return None


@torch.no_grad()
def _guess(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, str],
    ids: list[int],
    place: int,
    num_guesses: int,
) -> FilledMask:
    hidden = [*ids[:place], tokenizer.mask_token_id, *ids[place + 1 :]]
    inputs = torch.tensor([hidden], device=model.device)
    probabilities = (
        model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0, place].float().softmax(-1)
    )
    best = probabilities.topk(num_guesses)
    guesses = [
        (tokenizer.decode([token]), p) for token, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    code_start = ids.index(tokenizer.sep_token_id) + 1
    lead = " " if tokenizer.decode([ids[place]]).startswith(" ") else ""
    code = (
        tokenizer.decode(ids[code_start:place])
        + f"{lead}{tokenizer.mask_token}"
        + tokenizer.decode(ids[place + 1 : -1])
    )
    return FilledMask(row["docstring"], code, tokenizer.decode([ids[place]]).strip(), guesses)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that was measured in one run."""

    dense: bool
    sizes: SizeReport
    checkpoint_bytes: int
    reload_is_bit_equal: bool
    history: History
    unigram_loss: float
    num_targets: int
    """Hidden tokens the held-out losses are means of."""
    speed: SpeedComparison | None
    filled: list[FilledMask]
    training_data: str

    @property
    def train_loss(self) -> float:
        """Mean over the last steps, at most 50."""
        recent = self.history.losses[-50:]
        return sum(recent) / len(recent)

    @property
    def held_out_loss(self) -> float:
        """The last held-out loss."""
        return self.history.held_out[-1][1]


def write_metrics(outcome: Outcome, folder: Path, settings: dict[str, Any]) -> Path:
    """Write ``metrics.json`` into ``folder``."""
    history, speed = outcome.history, outcome.speed
    figures = {
        "train_loss": outcome.train_loss,
        "held_out_loss": outcome.held_out_loss,
        "unigram_loss": outcome.unigram_loss,
        "held_out_targets": outcome.num_targets,
        "steps": len(history.losses),
        "training_tokens": history.num_tokens,
        "training_seconds": history.seconds,
        "training_tokens_per_s": history.tokens_per_s,
        "checkpoint_bytes": outcome.checkpoint_bytes,
        "reload_is_bit_equal": outcome.reload_is_bit_equal,
        "sizes": dataclasses.asdict(outcome.sizes) | {"ratio": outcome.sizes.ratio},
        "speed": dataclasses.asdict(speed) | {"ratio": speed.ratio} if speed else None,
        "filled_masks": [dataclasses.asdict(filled) for filled in outcome.filled],
        "held_out_losses": history.held_out,
        "losses": history.losses,
        "training_data": outcome.training_data,
        "settings": settings,
        "machine": describe_machine(),
    }
    return write_whole(figures, folder / "metrics.json")


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print the tables, then the functions with their filled masks."""
    for table in (_size_table(outcome), _loss_table(outcome)):
        console.print(table)
        console.print()
    for number, filled in enumerate(outcome.filled, start=1):
        console.print(f"[bold]Held-out function {number}[/bold] [dim]{escape(_first_line(filled.docstring))}[/dim]")
        console.print(escape(filled.code), highlight=False)
        guesses = ", ".join(f"{guess.strip()!r} {probability:.1%}" for guess, probability in filled.guesses)
        console.print(
            f"[bold]hidden:[/bold] {escape(filled.name)}  [bold]guesses:[/bold] {escape(guesses)}\n", highlight=False
        )


def _size_table(outcome: Outcome) -> Table:
    sizes, speed = outcome.sizes, outcome.speed
    rows = [
        ("parameters", sizes.dense_parameters, sizes.parameters),
        ("parameters of the tensor-train layers", sizes.compressed_dense_parameters, sizes.compressed_parameters),
        ("bytes of the parameters", sizes.dense_bytes, sizes.bytes),
    ]
    if outcome.dense:
        table = _table("Size", "dense")
        for what, dense, _ in (rows[0], rows[2]):
            table.add_row(what, f"{dense:,}")
        table.add_row("bytes of the checkpoint on disk", f"{outcome.checkpoint_bytes:,}")
        return table
    table = _table("Size and speed", "dense baseline", "tensor train", "")
    for what, dense, ours in rows:
        table.add_row(what, f"{dense:,}", f"{ours:,}", f"{dense / ours:.1f}x smaller")
    table.add_row("bytes of the checkpoint on disk", "", f"{outcome.checkpoint_bytes:,}", "")
    if speed:
        faster = f"{speed.ratio:.2f}x as fast"
        rates = f"{speed.dense_tokens_per_s:,.0f}", f"{speed.compressed_tokens_per_s:,.0f}"
        table.add_row(f"training tokens/s, median of {speed.num_steps} steps each in turns", *rates, faster)
    return table


def _loss_table(outcome: Outcome) -> Table:
    history = outcome.history
    table = _table("Loss of hidden tokens (nats)", "")
    table.add_row(f"training, mean of the last {min(50, len(history.losses))} steps", f"{outcome.train_loss:.3f}")
    table.add_row(f"held-out, {outcome.num_targets:,} hidden tokens", f"[bold]{outcome.held_out_loss:.3f}[/bold]")
    table.add_row("held-out, unigram model on the same tokens", f"{outcome.unigram_loss:.3f}")
    table.add_section()
    table.add_row("steps", f"{len(history.losses):,}")
    table.add_row("training tokens", f"{history.num_tokens:,}")
    table.add_row("training tokens/s over the whole run", f"{history.tokens_per_s:,.0f}")
    table.add_row(
        "logits of the reloaded checkpoint", "bit-equal" if outcome.reload_is_bit_equal else "[red]differ[/red]"
    )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _first_line(docstring: str) -> str:
    return next((line.strip() for line in docstring.splitlines() if line.strip()), "")


def draw_losses(outcome: Outcome, path: Path) -> bool:
    """Draw the losses of the whole run into ``path``.

    Returns:
        False, with nothing drawn, where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = np.array(outcome.history.losses)
    window = max(1, len(losses) // 50)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(np.arange(1, len(losses) + 1), losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    axes.plot(np.arange(window, len(losses) + 1), smooth, color="tab:blue", label="training")
    axes.plot(
        *zip(*outcome.history.held_out, strict=True), color="tab:orange", marker="o", markersize=4, label="held-out"
    )
    axes.axhline(outcome.unigram_loss, color="tab:gray", linestyle="--", label="held-out, unigram model")
    form = "dense" if outcome.dense else f"tensor train, {outcome.sizes.ratio:.1f}x fewer parameters"
    axes.set(xlabel="step", ylabel="loss of hidden tokens (nats)", title=f"Masked language model on code, {form}")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def save_and_reload(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, inputs: torch.Tensor
) -> tuple[PreTrainedModel, bool]:
    """Save the model, load it the way a user would, and compare the logits of both on ``inputs``.

    Returns:
        The reloaded model, and whether its logits are equal bit for bit.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reloaded = AutoModelForMaskedLM.from_pretrained(folder).to(model.device)
    return reloaded, torch.equal(_logits(model, inputs), _logits(reloaded, inputs))


def measure(
    run: Run, settings: Settings, tokenizer: PreTrainedTokenizerBase, held_out_text: Dataset, facts: dict[str, Any]
) -> tuple[PreTrainedModel, Outcome]:
    """Save the model of a finished run and measure everything the report shows.

    Args:
        run: A run that is complete.
        settings: Its settings.
        tokenizer: Its tokenizer.
        held_out_text: The held-out rows as text.
        facts: ``unigram_loss``, ``training_data`` and ``max_seq_length``.

    Returns:
        The trained model, without the wrappers of Accelerate, and the figures.
    """
    folder = run.folder
    model = run.accelerator.unwrap_model(run.model).eval()
    reloaded, equal = save_and_reload(model, tokenizer, folder, run.held_out.batches[0]["input_ids"])
    filled = fill_masks(reloaded, tokenizer, held_out_text, max_seq_length=facts["max_seq_length"])
    steps = settings.training.speed_comparison_steps
    outcome = Outcome(
        dense=settings.model.dense,
        sizes=hf_comera.size_report(model),
        checkpoint_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        reload_is_bit_equal=equal,
        history=run.history,
        unigram_loss=facts["unigram_loss"],
        num_targets=run.held_out.num_targets,
        speed=None if settings.model.dense or not steps else _speed(reloaded, run, steps),
        filled=filled,
        training_data=facts["training_data"],
    )
    return model, outcome


def card_fields(outcome: Outcome, settings: Settings, command: str) -> dict[str, Any]:
    """What a model card says beyond what can be read off the model; measured values only."""
    targets = f"{outcome.num_targets:,} hidden tokens of held-out functions"
    values = [
        ("loss of hidden tokens (nats)", outcome.held_out_loss, targets),
        ("the same for a unigram model", outcome.unigram_loss, targets),
        ("training loss, mean of the last 50 steps", outcome.train_loss, "training data"),
    ]
    if outcome.speed:
        on = f"median of {outcome.speed.num_steps} steps each in turns, {machine()['processor']}"
        values.append(("training speed, times that of the dense baseline", outcome.speed.ratio, on))
    return {
        "base_model": settings.model.model_name_or_path,
        "training_data": outcome.training_data,
        "metrics": [{"name": name, "value": value, "measured_on": on} for name, value, on in values],
        "language": "code",
        "training_command": command,
    }


def publish(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, repo_id: str, *, private: bool, fields: dict[str, Any]
) -> None:
    """Push model, tokenizer and card to the Hub; a dense model goes without our card."""
    if hf_comera.is_comera_model(model):
        hf_comera.push_to_hub(model, repo_id, tokenizer=tokenizer, private=private or None, **fields)
    else:
        model.push_to_hub(repo_id, private=private or None)
        tokenizer.push_to_hub(repo_id)


@torch.no_grad()
def _logits(model: PreTrainedModel, inputs: torch.Tensor) -> torch.Tensor:
    return model.eval()(input_ids=inputs.to(model.device)).logits


def _speed(model: PreTrainedModel, run: Run, steps: int) -> SpeedComparison:
    """Compare with the dense baseline; ``model`` is used up by it."""
    batches = [run.batches[number] for number in range(steps + 1)]
    return compare_speed(model, dense_twin(model).to(model.device), batches, run.accelerator.autocast)
