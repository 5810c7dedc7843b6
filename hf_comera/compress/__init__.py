"""From (model, config) to a compressed model: targets, plan, surgery, sizes."""

from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.plan import CompressionPlan, LayerPlan, plan
from hf_comera.compress.size import SizeReport, print_trainable_parameters, size_report

__all__ = [
    "ComeraConfig",
    "CompressionPlan",
    "LayerPlan",
    "SizeReport",
    "plan",
    "print_trainable_parameters",
    "size_report",
]
