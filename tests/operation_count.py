"""How many operations reach a device, or would with tensors that have entries."""

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

VIEWS_AND_ALLOCATIONS = {
    *("view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach", "alias"),
    *("split", "split_with_sizes", "unbind", "as_strided", "_unsafe_view", "diagonal", "empty_like", "new_empty"),
    "is_same_size",
}


class CountOperations(TorchDispatchMode):
    """Counts all that are dispatched within, views and allocations included."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.total += 1
        return func(*args, **(kwargs or {}))


class CountComputations(TorchDispatchMode):
    """Counts those that compute, also those inside custom operators."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if namespace == "hf_comera":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.total += name not in VIEWS_AND_ALLOCATIONS
        return func(*args, **(kwargs or {}))
