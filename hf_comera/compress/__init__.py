"""From (model, config) to a compressed model: targets, plan, surgery, sizes, ranks, costs."""

from hf_comera.compress.calibration import Calibration, calibrate
from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.explain import Explanation, explain
from hf_comera.compress.plan import CompressionPlan, LayerPlan, plan
from hf_comera.compress.reports import RankReport, SizeReport, print_trainable_parameters, rank_report, size_report

__all__ = [
    "Calibration",
    "ComeraConfig",
    "CompressionPlan",
    "Explanation",
    "LayerPlan",
    "RankReport",
    "SizeReport",
    "calibrate",
    "explain",
    "plan",
    "print_trainable_parameters",
    "rank_report",
    "size_report",
]
