"""What autograd keeps for backward: rebuilt from codes, computed again, stored in fewer bits, or kept."""

from hf_comera.memory.attach import activation_policy, set_activation_policy
from hf_comera.memory.estimate import MemoryEstimate, estimate_memory
from hf_comera.memory.policy import ActivationPolicy
from hf_comera.memory.saved_bytes import SavedBytes

__all__ = [
    "ActivationPolicy",
    "MemoryEstimate",
    "SavedBytes",
    "activation_policy",
    "estimate_memory",
    "set_activation_policy",
]
