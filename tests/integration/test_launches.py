"""A training step of the paper's six-encoder model takes few operations, however its ranks differ.

Few tokens, so that nothing is done in chunks, which on a CPU spare memory for more operations.
"""

import collections

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification, BertConfig

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules import TTLinear
from hf_comera.modules.halves_bank import HalvesBank

VIEWS_AND_ALLOCATIONS = {
    *("view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach", "alias"),
    *("split", "split_with_sizes", "unbind", "as_strided", "_unsafe_view", "diagonal", "empty_like", "new_empty"),
    "is_same_size",
}
BUDGET = 620


class CountOperations(TorchDispatchMode):
    """Operations that compute, also those inside custom operators."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func._schema.name.split("::")
        if namespace == "hf_comera":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.seen[name] += name not in VIEWS_AND_ALLOCATIONS
        return func(*args, **(kwargs or {}))


def six_encoders():
    config = BertConfig(num_hidden_layers=6, num_labels=3)
    return get_comera_model(AutoModelForSequenceClassification, ComeraConfig(rank=30), config=config).train()


def operations(model):
    batch = {"input_ids": torch.randint(30522, (2, 16)), "labels": torch.tensor([0, 1])}
    for _ in range(2):  # how ranks are padded is found in the first
        model.zero_grad()
        with CountOperations() as count:
            model(**batch).loss.backward()
    return sum(count.seen.values())


def test_six_encoders_stay_within_the_budget():
    assert operations(six_encoders()) <= BUDGET


def test_layers_one_by_one_take_more_than_twice_as_many():
    model = six_encoders()
    for module in model.modules():
        if isinstance(module, TTLinear):
            module.join_bank(HalvesBank())
            module.joined = None
    assert operations(model) > 2 * BUDGET


def test_ragged_ranks_cost_a_few_more():
    model = six_encoders()
    for index, layer in enumerate(module for module in model.modules() if isinstance(module, TTLinear)):
        ranks = [1 + (index + place) % 6 for place in range(layer.num_cores - 1)]
        other = TTLinear(
            layer.in_features,
            layer.out_features,
            in_factors=layer.in_factors,
            out_factors=layer.out_factors,
            ranks=ranks,
        )
        layer.load_cores([core.detach() for core in other.cores()])
    assert operations(model) <= BUDGET + 40
