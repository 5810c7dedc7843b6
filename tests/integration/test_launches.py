"""A training step of the paper's six-encoder model takes few operations, however its ranks differ.

Few tokens, so that nothing is done in chunks, which on a CPU spare memory for more operations.
"""

import torch
from transformers import AutoModelForSequenceClassification, BertConfig

from hf_comera import ComeraConfig, get_comera_model
from hf_comera.modules import TTLinear
from hf_comera.modules.fusion import unfuse
from hf_comera.modules.halves_cache import HalvesCache
from tests.operation_count import CountComputations

BUDGET = 780
"""Blocks take more small operations than layers alone that share their halves, which take 650."""


def six_encoders():
    config = BertConfig(num_hidden_layers=6, num_labels=3)
    return get_comera_model(AutoModelForSequenceClassification, ComeraConfig(rank=30), config=config).train()


def operations(model):
    batch = {"input_ids": torch.randint(30522, (2, 16)), "labels": torch.tensor([0, 1])}
    for _ in range(2):  # how ranks are padded is found in the first
        model.zero_grad()
        with CountComputations() as count:
            model(**batch).loss.backward()
    return count.total


def test_six_encoders_stay_within_the_budget():
    assert operations(six_encoders()) <= BUDGET


def test_layers_one_by_one_take_almost_twice_as_many():
    model = six_encoders()
    unfuse(model)
    for module in model.modules():
        if isinstance(module, TTLinear):
            module.join_cache(HalvesCache())
    assert operations(model) > 1.9 * operations(six_encoders())


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
