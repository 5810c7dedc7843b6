"""Parameter groups and optimizers."""

from hf_comera.optim.param_groups import comera_param_groups

__all__ = ["comera_param_groups"]
