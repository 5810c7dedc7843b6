"""Training compressed models: the Trainer with our optimizer, and rank adaptation for any loop."""

from hf_comera.training.cuda_graphs.step import GraphedStep
from hf_comera.training.heal import HealingArguments, HealingTrainer
from hf_comera.training.ranks.adapter import RankAdapter
from hf_comera.training.ranks.callback import ComeraCallback
from hf_comera.training.ranks.gates import add_rank_gates, fold_rank_gates
from hf_comera.training.ranks.settings import RankAdaptation
from hf_comera.training.trainer import ComeraTrainer, ComeraTrainerMixin

__all__ = [
    "ComeraCallback",
    "ComeraTrainer",
    "ComeraTrainerMixin",
    "GraphedStep",
    "HealingArguments",
    "HealingTrainer",
    "RankAdaptation",
    "RankAdapter",
    "add_rank_gates",
    "fold_rank_gates",
]
