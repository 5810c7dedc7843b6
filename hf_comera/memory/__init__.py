"""Tensors that autograd saves for backward: rebuilt from latents, recomputed, stored in fewer bits, or kept."""

from hf_comera.memory.attach import SavedBytes, activation_policy, set_activation_policy
from hf_comera.memory.estimate import MemoryEstimate, estimate_memory
from hf_comera.memory.fp8_linears import Fp8LinearsReport, set_fp8_linears
from hf_comera.memory.policy import ActivationPolicy

__all__ = [
    "ActivationPolicy",
    "Fp8LinearsReport",
    "MemoryEstimate",
    "SavedBytes",
    "activation_policy",
    "estimate_memory",
    "set_activation_policy",
    "set_fp8_linears",
]
