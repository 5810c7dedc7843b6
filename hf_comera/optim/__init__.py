"""Parameter groups and optimizers."""

from hf_comera.optim.coat_adamw import CoatAdamW
from hf_comera.optim.param_groups import comera_param_groups, take_saved_groups
from hf_comera.optim.tt_muon import TTMuon

__all__ = ["CoatAdamW", "TTMuon", "comera_param_groups", "take_saved_groups"]
