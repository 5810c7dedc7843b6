"""What Accelerate's wrapper around an optimizer knows of a step; for any other optimizer, that nothing is unusual."""

import torch

__all__ = ["only_gathers", "unscale", "was_skipped"]


def only_gathers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it only gathers gradients at present (``accelerator.accumulate``)."""
    state = getattr(optimizer, "gradient_state", None)
    return state is not None and not state.sync_gradients


def unscale(optimizer: torch.optim.Optimizer) -> None:
    """Have its scaler of fp16 losses, if it has one, divide the gradients now, not only in the step."""
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        try:
            scaler.unscale_(optimizer.optimizer)  # type: ignore[attr-defined]
        except RuntimeError as error:
            if "already been called" not in str(error):  # it has, for clipping
                raise


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its scaler has left out the last step, whose gradients were not finite."""
    return bool(getattr(optimizer, "step_was_skipped", False))
