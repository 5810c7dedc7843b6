"""The models of the memory benchmark, with a batch each: six-encoder BERT, GPT-2 and Llama; tiny ones for tests."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_comera import ComeraConfig, get_comera_model
from interleaved_timing import TENSOR_TRAIN
from six_encoders import TARGETS, paper_shapes, six_encoders

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with random weights and its batch."""

    model_class: type[PreTrainedModel]
    config: Callable[[float], PreTrainedConfig]
    """From the dropout."""
    compression: Callable[[], ComeraConfig]
    length: int
    """Tokens a sequence."""

    def build(self, form: str, dropout: float) -> PreTrainedModel:
        """The model in one of its forms, in training mode."""
        config = self.config(dropout)
        if form == TENSOR_TRAIN:
            return get_comera_model(self.model_class, self.compression(), config=config).train()
        return self.model_class(config).train()

    def batch(self, sequences: int, device: torch.device) -> dict[str, Tensor]:
        """Always the same random tokens, without padding; classes to learn, or the tokens themselves."""
        config = self.config(0.0)
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (sequences, self.length), generator=random)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        if self.model_class is BertForSequenceClassification:
            batch["labels"] = torch.randint(config.num_labels, (sequences,), generator=random)
        return {name: tensor.to(device) for name, tensor in batch.items()}


def _bert(dropout: float) -> BertConfig:
    return six_encoders(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)


def _gpt2(width: int, layers: int, vocabulary: int) -> Callable[[float], GPT2Config]:
    def config(dropout: float) -> GPT2Config:
        shape = {"n_embd": width, "n_layer": layers, "n_head": width // 64, "vocab_size": vocabulary}
        ids = {"bos_token_id": None, "eos_token_id": None}
        return GPT2Config(**shape, **ids, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False)

    return config


def _llama(width: int, layers: int, vocabulary: int) -> Callable[[float], LlamaConfig]:
    def config(dropout: float) -> LlamaConfig:
        shape = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers}
        heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
        return LlamaConfig(**shape, **heads, vocab_size=vocabulary, attention_dropout=dropout, use_cache=False)

    return config


def _tiny_bert(dropout: float) -> BertConfig:
    shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 1000}
    return six_encoders(
        **shape, num_hidden_layers=2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )


_BERT = {"model_class": BertForSequenceClassification}
_GPT2 = {"model_class": GPT2LMHeadModel}
_LLAMA = {"model_class": LlamaForCausalLM}
WORKLOADS = {
    "bert-6x768": Workload(**_BERT, config=_bert, compression=paper_shapes, length=128),
    "gpt2-24x1024": Workload(**_GPT2, config=_gpt2(1024, 24, 50257), compression=ComeraConfig, length=512),
    "llama-8x1024": Workload(**_LLAMA, config=_llama(1024, 8, 32000), compression=ComeraConfig, length=2048),
    "bert-tiny": Workload(
        **_BERT, config=_tiny_bert, compression=lambda: ComeraConfig(target_modules=TARGETS, rank=8), length=64
    ),
    "gpt2-tiny": Workload(**_GPT2, config=_gpt2(64, 2, 1000), compression=lambda: ComeraConfig(rank=8), length=128),
    "llama-tiny": Workload(**_LLAMA, config=_llama(64, 2, 1000), compression=lambda: ComeraConfig(rank=8), length=256),
}
"""By the name that rows have."""
