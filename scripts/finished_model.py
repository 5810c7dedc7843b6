"""The finished model: saved, reloaded and compared, measured, described by a card, and published if that is wanted."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

import hf_comera
from filled_masks import fill_masks
from interleaved_timing import machine
from model_setup import dense_twin
from pretrain_report import Outcome
from pretrain_settings import Settings
from speed_comparison import SpeedComparison, compare_speed
from train_loop import Run


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
        values.append(("training speed, times that of the dense twin", outcome.speed.ratio, on))
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
    """Compare with the dense twin; ``model`` is used up by it."""
    batches = [run.batches[number] for number in range(steps + 1)]
    return compare_speed(model, dense_twin(model).to(model.device), batches, run.accelerator.autocast)
