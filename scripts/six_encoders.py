"""The model of the CoMERA paper's experiment on MNLI: BERT with six encoders, and its tensor-train shapes.

Source: CoMERA, arXiv:2405.14377, and its code.
"""

import math
from typing import Any

from transformers import BertConfig

from hf_comera import ComeraConfig

CLASSES = ("entailment", "neutral", "contradiction")
"""In the order of GLUE."""

TARGETS = ["word_embeddings", "query", "key", "value", "dense"]
"""Attention, FFN and embedding, and the pooler, which is the first layer of the paper's classifier."""

# The paper's code counts 1,490,157: 4,362 rank gates more, of which this model has none. The dense count is its own.
DENSE_PARAMETERS, TENSOR_TRAIN_PARAMETERS = 66_957_315, 1_485_795

_SQUARE = r"query|key|value|attention\.output\.dense|pooler\.dense"
_WIDEN = r"intermediate\.dense"
_NARROW = r"layer\.\d+\.output\.dense"
_FACTORS = {
    "word_embeddings": {"in_factors": [16, 20, 10, 10], "out_factors": [4, 4, 8, 6]},
    _SQUARE: {"in_factors": [12, 8, 8], "out_factors": [8, 8, 12]},
    _WIDEN: {"in_factors": [12, 8, 8], "out_factors": [12, 16, 16]},
    _NARROW: {"in_factors": [16, 16, 12], "out_factors": [8, 8, 12]},
}
_RANKS = {
    "word_embeddings": [32, 32, 32],
    _SQUARE: [12, 30, 30, 30, 12],
    _WIDEN: [12, 30, 30, 30, 16],
    _NARROW: [16, 30, 30, 30, 12],
}
_HIDDEN, _FFN, _LARGEST_VOCABULARY = 768, 3072, math.prod(_FACTORS["word_embeddings"]["in_factors"])


def six_encoders(**changes: Any) -> BertConfig:
    """The paper's shape: hidden size 768, 12 heads, FFN 3072, 30522 tokens, 512 positions, three classes."""
    names = dict(enumerate(CLASSES))
    numbers = {name: number for number, name in names.items()}
    return BertConfig(**{"num_hidden_layers": 6, "id2label": names, "label2id": numbers, **changes})


def paper_shapes() -> ComeraConfig:
    """The paper's factors and ranks; a new object each time, as a model keeps the one it is given."""
    return ComeraConfig(target_modules=TARGETS, factor_pattern=_FACTORS, rank_pattern=_RANKS)


def has_paper_sizes(config: BertConfig) -> bool:
    """Whether the paper's factors fit the layers of this model, however many they are."""
    sizes = config.hidden_size, config.intermediate_size
    return sizes == (_HIDDEN, _FFN) and config.vocab_size <= _LARGEST_VOCABULARY
