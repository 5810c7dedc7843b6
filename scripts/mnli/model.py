"""The model to train on pairs of sentences: the paper's six encoders or a changed shape; tensor train or dense."""

import difflib
import math
from typing import Any

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_comera import ComeraConfig, get_comera_model
from mnli.settings import ModelSettings

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
DEFAULT_RANK = 30


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


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer with that name.

    Raises:
        ValueError: If there is none, or it cannot pad.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"--tokenizer_name {name}: no tokenizer could be loaded: {error} Needed: a name on the Hub or a local "
            "folder, for example google-bert/bert-base-uncased."
        ) from error
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"--tokenizer_name {name} has no padding token. Use one of an encoder, for example "
            "google-bert/bert-base-uncased."
        )
    return tokenizer


def build_config(overrides: str | None, tokenizer: PreTrainedTokenizerBase, max_length: int) -> BertConfig:
    """The configuration: six encoders, changed by ``overrides``, with the tokens of the tokenizer.

    Raises:
        ValueError: If an override is unknown or does not fit, or the positions are too few for ``max_length``.
    """
    config = six_encoders(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    if overrides:
        _apply(overrides, config)
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"--config_overrides {overrides} makes hidden_size={config.hidden_size} and "
            f"num_attention_heads={config.num_attention_heads}. The heads must divide the size, for example "
            "hidden_size=256,num_attention_heads=4."
        )
    if max_length > config.max_position_embeddings:
        raise ValueError(
            f"--max_length {max_length} is more than the {config.max_position_embeddings} positions of the model. Use "
            f"--max_length {config.max_position_embeddings}, or --config_overrides "
            f"max_position_embeddings={max_length}."
        )
    return config


def build_model(settings: ModelSettings, config: BertConfig) -> PreTrainedModel:
    """The model with random weights, in the form that the settings ask for."""
    if settings.dense:
        return AutoModelForSequenceClassification.from_config(config)
    return get_comera_model(AutoModelForSequenceClassification, shapes(config, settings.rank), config=config)


def shapes(config: BertConfig, rank: int | None) -> ComeraConfig:
    """Factors and ranks: the paper's where they fit and no rank is asked for, else the library's."""
    if rank is None and has_paper_sizes(config):
        return paper_shapes()
    return ComeraConfig(target_modules=TARGETS, rank=rank or DEFAULT_RANK)


def describe_shapes(settings: ModelSettings, config: BertConfig) -> str:
    """Factors and ranks in a word, for tables."""
    if settings.dense:
        return "dense"
    if settings.rank is None and has_paper_sizes(config):
        return "paper"
    return f"rank {settings.rank or DEFAULT_RANK}"


def _apply(overrides: str, config: BertConfig) -> None:
    known = config.to_dict().keys() - {"vocab_size", "pad_token_id", "id2label", "label2id", "model_type"}
    for part in overrides.split(","):
        name, equals, _ = part.partition("=")
        if not equals or name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=3) or ["hidden_size", "num_hidden_layers"]
            raise ValueError(
                f"--config_overrides: {part!r} changes nothing that can be changed here (vocabulary and classes "
                f"follow from tokenizer and data). Needed: name=value, separated by commas, with names such as "
                f"{', '.join(near)}; for example hidden_size=256,num_attention_heads=4."
            )
    try:
        config.update_from_string(overrides)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"--config_overrides {overrides}: {error}. Needed: numbers, words, true or false, for example "
            "num_hidden_layers=4."
        ) from error
