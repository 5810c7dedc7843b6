"""Tiny configs of the architectures that every behaviour is tested on, with inputs: one row a model."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    RobertaConfig,
    T5Config,
    ViTConfig,
)

VOCABULARY = 241
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
WORDS = {"vocab_size": VOCABULARY}
GPT2_SIZES = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}


@dataclass
class Architecture:
    """One row: how the model is made, and how many layers of it are compressed and tied by default."""

    auto_class: Any
    config: PreTrainedConfig
    num_layers: int
    num_tied: int = 0

    def new_config(self):
        """A fresh copy, since models keep and change theirs."""
        return copy.deepcopy(self.config)

    def new_model(self):
        """A dense model."""
        return self.auto_class.from_config(self.new_config()).eval()

    def inputs(self):
        """A batch of two, without labels."""
        if self.config.model_type == "vit":
            return {"pixel_values": torch.randn(2, 3, 32, 32)}
        ids = torch.randint(2, VOCABULARY, (2, 9))
        return (
            {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
            if self.config.model_type == "t5"
            else {"input_ids": ids}
        )

    def training_inputs(self):
        """A batch of two with labels."""
        inputs = self.inputs()
        if self.auto_class in (AutoModelForSequenceClassification, AutoModelForImageClassification):
            return {**inputs, "labels": torch.tensor([0, 1])}
        labels = inputs.pop("decoder_input_ids", inputs["input_ids"]).contiguous()
        return {**inputs, "labels": labels}


ARCHITECTURES = {
    "bert-mlm": Architecture(AutoModelForMaskedLM, BertConfig(**SIZES, **WORDS), 13, 1),
    "bert-classifier": Architecture(AutoModelForSequenceClassification, BertConfig(**SIZES, **WORDS), 13),
    "roberta": Architecture(
        AutoModelForMaskedLM, RobertaConfig(**SIZES, **WORDS, max_position_embeddings=66, pad_token_id=1), 13, 1
    ),
    "distilbert": Architecture(
        AutoModelForMaskedLM, DistilBertConfig(dim=48, n_layers=2, n_heads=4, hidden_dim=96, **WORDS), 13, 1
    ),
    "gpt2": Architecture(AutoModelForCausalLM, GPT2Config(**GPT2_SIZES, **WORDS), 9, 1),
    "llama-tied": Architecture(
        AutoModelForCausalLM, LlamaConfig(**SIZES, **WORDS, num_key_value_heads=2, tie_word_embeddings=True), 15, 1
    ),
    "llama-untied": Architecture(
        AutoModelForCausalLM, LlamaConfig(**SIZES, **WORDS, num_key_value_heads=2, tie_word_embeddings=False), 15
    ),
    "mistral": Architecture(AutoModelForCausalLM, MistralConfig(**SIZES, **WORDS, num_key_value_heads=2), 15),
    "qwen2": Architecture(
        AutoModelForCausalLM, Qwen2Config(**SIZES, **WORDS, num_key_value_heads=2, tie_word_embeddings=True), 15, 1
    ),
    "t5": Architecture(
        AutoModelForSeq2SeqLM,
        T5Config(d_model=48, d_ff=96, d_kv=12, num_heads=4, num_layers=2, decoder_start_token_id=0, **WORDS),
        33,
        3,
    ),
    "vit": Architecture(AutoModelForImageClassification, ViTConfig(**SIZES, image_size=32, patch_size=8), 12),
}

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
