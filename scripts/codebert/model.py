"""The model to train: small RoBERTa, named configuration or named weights; in tensor-train form or dense."""

import copy

from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RobertaConfig,
)

from codebert.settings import ModelSettings
from hf_comera import ComeraConfig, get_comera_model, set_head_and_loss
from hf_comera.modules.head_and_loss import HeadAndLoss

# The demo's shape. Learns something on two CPU cores in minutes; RoBERTa-base would take days.
SMALL_ROBERTA = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "type_vocab_size": 1,
    "hidden_dropout_prob": 0.0,  # a few passes over the data: the model is far from learning it by heart
    "attention_probs_dropout_prob": 0.0,
}
DEMO_VOCABULARY = 4096
DEMO_LENGTH = 64


def load_config(settings: ModelSettings, max_seq_length: int | None = None) -> PreTrainedConfig:
    """The configuration of the model, before the tokenizer has its say.

    Args:
        settings: Which model.
        max_seq_length: Tokens a sequence; the small RoBERTa gets as many positions, named models have their own.

    Raises:
        ValueError: If it cannot be found or is not that of a masked language model.
    """
    name = settings.model_name_or_path or settings.config_name
    if name is None:
        positions = (max_seq_length or DEMO_LENGTH) + 2
        config = RobertaConfig(max_position_embeddings=positions, **SMALL_ROBERTA)
    else:
        try:
            config = AutoConfig.from_pretrained(name)
        except OSError as error:
            raise ValueError(f"No model configuration could be loaded from {name}: {error}") from error
    if type(config) not in AutoModelForMaskedLM._model_mapping:
        raise ValueError(
            f"{name} is a {config.model_type}, which Transformers has no masked language model for. Use for example "
            "--config_name microsoft/codebert-base."
        )
    if settings.config_overrides:
        config.update_from_string(settings.config_overrides)
    return config


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Tokens the model's position table takes; None for models without one.

    RoBERTa and its kin number positions from the padding id on, so some rows are never reached.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return None
    offset = config.model_type in {
        "roberta",
        "xlm-roberta",
        "camembert",
        "roberta-prelayernorm",
        "mpnet",
        "longformer",
    }
    return positions - (config.pad_token_id + 1 if offset else 0)


def fit_to_tokenizer(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, pretrained: bool) -> None:
    """Give ``config`` the vocabulary of the tokenizer; trained weights keep theirs.

    Raises:
        ValueError: If the tokenizer has more tokens than the trained embedding has rows.
    """
    if pretrained:
        if len(tokenizer) > config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens, the model only {config.vocab_size} rows for them. Use "
                "the model's own tokenizer: leave --tokenizer_name out."
            )
        return
    config.vocab_size = len(tokenizer)
    for name in ("bos", "eos", "pad"):
        token_id = getattr(tokenizer, f"{name}_token_id")
        if token_id is not None:
            setattr(config, f"{name}_token_id", token_id)


def build_model(settings: ModelSettings, config: PreTrainedConfig) -> PreTrainedModel:
    """The model the settings describe, ready to train.

    Raises:
        ValueError: If a checkpoint that is already in tensor-train form is asked for as dense.
    """
    name, comera_config = settings.model_name_or_path, ComeraConfig(rank=settings.rank)
    compressed_already = getattr(config, "quantization_config", None) is not None
    if compressed_already and settings.dense:
        raise ValueError(
            f"{name} is in tensor-train form already. Leave --dense out, or merge it first: model.merge_and_unload()."
        )
    if settings.dense:
        dense = AutoModelForMaskedLM.from_pretrained(name) if name else AutoModelForMaskedLM.from_config(config)
        return with_head_and_loss(dense)
    if name is None:
        return get_comera_model(AutoModelForMaskedLM, comera_config, config=config)
    if compressed_already:  # keeps the ranks it has
        return AutoModelForMaskedLM.from_pretrained(name)
    return AutoModelForMaskedLM.from_pretrained(name, quantization_config=comera_config)


def dense_twin(model: PreTrainedModel) -> PreTrainedModel:
    """An uncompressed model of the same shape with random weights, to compare speed and size with."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    return with_head_and_loss(AutoModelForMaskedLM.from_config(config))


def with_head_and_loss(dense: PreTrainedModel) -> PreTrainedModel:
    """The model, whose logits are those of hidden tokens alone while it trains, as in compressed models."""
    if isinstance(HeadAndLoss.of(dense), HeadAndLoss):
        set_head_and_loss(dense)
    return dense
