"""The card that a plain ``Trainer`` writes of a compressed model says how to load it.

``Trainer.create_model_card`` overwrites the card in its folder, and has no hook for models that are not PEFT's. Who
downloads such a folder would have no hint at all. So the summary that it makes of a compressed model, and of no
other, adds hf_comera's part to its text.
"""

import functools
from pathlib import Path
from typing import Any

from transformers.modelcard import TrainingSummary

from hf_comera.hub.cards import with_own_part
from hf_comera.hub.model import is_comera_model

__all__ = ["extend_trainer_cards"]


@functools.cache
def extend_trainer_cards() -> None:
    """Have Transformers' summaries of training runs with compressed models tell how to load these; once a process."""
    original = TrainingSummary.from_trainer

    @functools.wraps(original)
    def from_trainer(cls: type[TrainingSummary], trainer: Any, *args: Any, **kwargs: Any) -> TrainingSummary:
        summary = original.__func__(cls, trainer, *args, **kwargs)
        model = trainer.accelerator.unwrap_model(trainer.model)
        if is_comera_model(model):
            write = summary.to_model_card
            summary.to_model_card = lambda: with_own_part(write(), model, Path(trainer.args.output_dir))
        return summary

    TrainingSummary.from_trainer = classmethod(from_trainer)
