"""Train Transformers in tensor-train form from the first step, with the ordinary Hugging Face API."""

from hf_comera.compress import (
    Calibration,
    ComeraConfig,
    CompressionPlan,
    Explanation,
    RankReport,
    SizeReport,
    calibrate,
    explain,
    plan,
    print_trainable_parameters,
    rank_report,
    size_report,
)
from hf_comera.compress.prediction import predict_speed
from hf_comera.hub.build import get_comera_model
from hf_comera.hub.cards import extend_trainer_cards, write_model_card
from hf_comera.hub.export import export_onnx
from hf_comera.hub.inspection import inspect_checkpoint
from hf_comera.hub.model import is_comera_model, merge_and_unload
from hf_comera.hub.push import push_folder, push_to_hub
from hf_comera.hub.quantizer import register
from hf_comera.memory import (
    ActivationPolicy,
    MemoryEstimate,
    estimate_memory,
    set_activation_policy,
    set_fp8_linears,
)
from hf_comera.modules.head_and_loss import set_head_and_loss
from hf_comera.optim import CoatAdamW, TTMuon, comera_param_groups
from hf_comera.training import (
    ComeraCallback,
    ComeraTrainer,
    GraphedStep,
    HealingArguments,
    HealingTrainer,
    RankAdaptation,
    RankAdapter,
    add_rank_gates,
    fold_rank_gates,
)

register()
extend_trainer_cards()

__version__ = "0.1.0"

__all__ = [
    "ActivationPolicy",
    "Calibration",
    "CoatAdamW",
    "ComeraCallback",
    "ComeraConfig",
    "ComeraTrainer",
    "CompressionPlan",
    "Explanation",
    "GraphedStep",
    "HealingArguments",
    "HealingTrainer",
    "MemoryEstimate",
    "RankAdaptation",
    "RankAdapter",
    "RankReport",
    "SizeReport",
    "TTMuon",
    "add_rank_gates",
    "calibrate",
    "comera_param_groups",
    "estimate_memory",
    "explain",
    "export_onnx",
    "fold_rank_gates",
    "get_comera_model",
    "inspect_checkpoint",
    "is_comera_model",
    "merge_and_unload",
    "plan",
    "predict_speed",
    "print_trainable_parameters",
    "push_folder",
    "push_to_hub",
    "rank_report",
    "set_activation_policy",
    "set_fp8_linears",
    "set_head_and_loss",
    "size_report",
    "write_model_card",
]
