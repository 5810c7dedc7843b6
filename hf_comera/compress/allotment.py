"""Ranks of a trained model under a wanted size: each number goes where the model's output loses most without it.

The squared error of a layer at rank r is the energy of its outputs beyond the r leading directions. The output of the
model loses the layer's sensitivity times that. So each rank has an importance, and those of the least importance per
parameter go until the size holds.
"""

import dataclasses
import logging
import math

from hf_comera.compress.calibration import Calibration
from hf_comera.compress.config import ComeraConfig
from hf_comera.compress.plan import CompressionPlan, LayerPlan
from hf_comera.compress.trimming import LayerRanks, smallest_size, trim

__all__ = ["allot", "calibrated_plan", "load_calibration", "refuse_target", "smallest_parameters"]

logger = logging.getLogger(__name__)


def load_calibration(config: ComeraConfig) -> Calibration | None:
    """The statistics that ``config.calibration`` names, if it does.

    Raises:
        ValueError: If the folder has none.
    """
    return None if config.calibration is None else Calibration.load(config.calibration)


def calibrated_plan(plan: CompressionPlan, config: ComeraConfig, calibration: Calibration | None) -> CompressionPlan:
    """``plan`` as it is, or with ranks for the wanted size if ``config`` names one.

    Raises:
        ValueError: As :func:`allot`; or if a size is wanted without a calibration.
    """
    if calibration is None:
        refuse_target(config)
        return plan
    unknown = [x.name for x in plan.layers if x.name in calibration.layers and not calibration.knows(x.name)]
    if unknown:
        logger.warning(
            "%d layers saw fewer inputs than an input has numbers, for example %s. They are decomposed by their "
            "weights alone, and count as the least sensitive ones. Give calibrate more batches.",
            len(unknown), unknown[0],
        )  # fmt: skip
    return allot(plan, config, calibration) if _target_name(config) else plan


def refuse_target(config: ComeraConfig) -> None:
    """Refuse a wanted size where nothing says which ranks matter.

    Raises:
        ValueError: If ``config`` names one.
    """
    name = _target_name(config)
    if name is not None:
        raise ValueError(
            f"{name}={getattr(config, name)} of ComeraConfig needs a trained model and calibration=calibrate(model, "
            "batches), which tells the ranks that matter. Give one; or set rank; or, to cut ranks while training, use "
            f"RankAdaptation({name}=...)."
        )


def _target_name(config: ComeraConfig) -> str | None:
    return next((name for name in ("target_ratio", "target_parameters") if getattr(config, name) is not None), None)


def allot(plan: CompressionPlan, config: ComeraConfig, calibration: Calibration) -> CompressionPlan:
    """The plan with the formats and ranks that give the least error of the model's output at the wanted size.

    Linear layers become two factors, embeddings factorized ones: at equal size these were nearer to trained weights
    than tensor trains of more cores in every layer that was measured, up to 32 times smaller (benchmarks/NOTES.md).

    Args:
        plan: Which layers; their factors and ranks are chosen anew.
        config: With ``target_ratio`` or ``target_parameters``.
        calibration: Of this model, with sensitivities.

    Returns:
        A plan whose size is the wanted one, or less by no more than one rank of the cheapest layer.

    Raises:
        ValueError: If the size cannot be reached, or the calibration is of another model or has no sensitivities.
    """
    layers = [_layer_ranks(layer, calibration) for layer in plan.layers]
    kept = trim(layers, _budget(plan, config, smallest_size(layers)))
    chosen = [_two_factors(layer, len(bonds[0])) for layer, bonds in zip(plan.layers, kept, strict=True)]
    return dataclasses.replace(plan, layers=chosen)


def smallest_parameters(plan: CompressionPlan, calibration: Calibration) -> int:
    """The fewest parameters that :func:`allot` can be asked for: those of the model with rank 1 in all its layers."""
    others = plan.dense_parameters - sum(layer.dense_parameters for layer in plan.layers)
    return others + smallest_size([_layer_ranks(layer, calibration) for layer in plan.layers])


def _layer_ranks(layer: LayerPlan, calibration: Calibration) -> LayerRanks:
    """Two factors of the largest rank that saves anything, and the importance of each rank."""
    energies = calibration.energies_of(layer.name, layer.in_size, layer.out_size)
    importance = energies * calibration.sensitivity(layer.name)
    most = max(1, (layer.dense_parameters - 1) // (layer.in_size + layer.out_size))
    return LayerRanks((layer.in_size, layer.out_size), [importance[:most].numpy()], floor=1)


def _budget(plan: CompressionPlan, config: ComeraConfig, smallest: int) -> int:
    """Numbers that are left for the layers of the plan."""
    others = plan.dense_parameters - sum(layer.dense_parameters for layer in plan.layers)
    name = "target_ratio" if config.target_ratio is not None else "target_parameters"
    wanted = config.target_parameters
    if config.target_ratio is not None:
        wanted = int(config.target_ratio * plan.dense_parameters)
    assert wanted is not None
    if wanted - others < smallest:
        ratio = math.ceil(1e4 * (others + smallest) / plan.dense_parameters) / 1e4
        raise ValueError(
            f"{name}={getattr(config, name)} asks for {wanted:,} parameters, but {others:,} are in layers that stay "
            f"dense, and the compressed ones need {smallest:,} at rank 1. Use at least target_parameters="
            f"{others + smallest} (target_ratio={ratio}), or compress more layers."
        )
    return wanted - others


def _two_factors(layer: LayerPlan, rank: int) -> LayerPlan:
    if layer.kind == "tt_linear":
        return dataclasses.replace(layer, in_factors=(layer.in_size,), out_factors=(layer.out_size,), ranks=(rank,))
    return dataclasses.replace(
        layer, kind="factorized_embedding", in_factors=(layer.in_size,), out_factors=(rank,), ranks=(), width=rank
    )
