"""Training compressed models with the Trainer of Transformers."""

from hf_comera.training.trainer import ComeraTrainer, ComeraTrainerMixin

__all__ = ["ComeraTrainer", "ComeraTrainerMixin"]
