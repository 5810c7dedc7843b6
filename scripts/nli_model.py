"""The model to train on pairs of sentences: the paper's six encoders or a changed shape; tensor train or dense."""

import difflib

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_comera import ComeraConfig, get_comera_model
from mnli_settings import ModelSettings
from six_encoders import TARGETS, has_paper_sizes, paper_shapes, six_encoders

DEFAULT_RANK = 30


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
