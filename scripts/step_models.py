"""The models that bench_step.py times: a tensor train, and dense models that compute the same."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
)

from hf_comera import ComeraConfig, CompressionPlan, get_comera_model, size_report
from hf_comera.compress import LayerPlan
from interleaved_timing import DENSE, TENSOR_TRAIN, check_agreement
from six_encoders import DENSE_PARAMETERS, TARGETS, TENSOR_TRAIN_PARAMETERS, paper_shapes, six_encoders

NARROW_DENSE = "narrow dense"
"""A dense model but for its embedding, which is factorized."""
PAPER, LARGE = "bert-6x768", "bert-24x1024"
MASKED, CAUSAL, DECODER = "roberta-12x768", "gpt2-12x768", "llama-1x4096"
SMALL_MASKED, SMALL_CAUSAL, SMALL_ROTARY = "roberta-4x768", "gpt2-6x768", "llama-8x1024"
TINY_CLASSIFIER, TINY_MASKED, TINY_CAUSAL, TINY_DECODER = "tiny-bert", "tiny-roberta", "tiny-gpt2", "tiny-llama"
MODELS = (PAPER, LARGE, MASKED, SMALL_MASKED, CAUSAL, SMALL_CAUSAL, DECODER, SMALL_ROTARY)
IGNORED, HIDDEN_SHARE = -100, 0.15  # label of a token that is not asked for; share of those that are, as in BERT
_LARGE_SIZES = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
_TINY_SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
_TINY_GPT2 = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 120, "n_positions": 64}
# Of Llama's first model, with few tokens: what is measured is the block, not the head.
_LLAMA_SIZES = {"num_hidden_layers": 1, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
_LLAMA_SIZES |= {"vocab_size": 512}


# With a vocabulary, whose table is the head's too.
_SMALL_LLAMA = {"vocab_size": 32000, "num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16}
_SMALL_LLAMA |= {"intermediate_size": 2816, "tie_word_embeddings": True}


class _Case(NamedTuple):
    auto_class: Any
    new_config: Callable[[float], PreTrainedConfig]
    """From the dropout."""
    new_shapes: Callable[[], ComeraConfig]


def _bert(**sizes: int) -> Callable[[float], PreTrainedConfig]:
    return lambda dropout: six_encoders(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes)


def _roberta(**sizes: int) -> Callable[[float], PreTrainedConfig]:
    return lambda dropout: RobertaConfig(
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, max_position_embeddings=514, **sizes
    )


def _gpt2(**sizes: int) -> Callable[[float], PreTrainedConfig]:
    return lambda dropout: GPT2Config(
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, **sizes
    )


def _llama(**sizes: int) -> Callable[[float], PreTrainedConfig]:
    return lambda _: LlamaConfig(use_cache=False, **sizes)


_CASES = {
    PAPER: _Case(AutoModelForSequenceClassification, _bert(), paper_shapes),
    LARGE: _Case(
        AutoModelForSequenceClassification,
        _bert(**_LARGE_SIZES),
        lambda: ComeraConfig(rank=64, target_modules=TARGETS),
    ),
    MASKED: _Case(AutoModelForMaskedLM, _roberta(vocab_size=50265), lambda: ComeraConfig(rank=32)),
    SMALL_MASKED: _Case(
        AutoModelForMaskedLM, _roberta(vocab_size=50265, num_hidden_layers=4), lambda: ComeraConfig(rank=32)
    ),
    CAUSAL: _Case(AutoModelForCausalLM, _gpt2(), lambda: ComeraConfig(rank=32)),
    SMALL_CAUSAL: _Case(AutoModelForCausalLM, _gpt2(n_layer=6), lambda: ComeraConfig(rank=32)),
    SMALL_ROTARY: _Case(AutoModelForCausalLM, _llama(**_SMALL_LLAMA), lambda: ComeraConfig(rank=32)),
    DECODER: _Case(AutoModelForCausalLM, _llama(**_LLAMA_SIZES), lambda: ComeraConfig(rank=64)),
    # For tests, and for rehearsals of gpu_report.py.
    TINY_CLASSIFIER: _Case(
        AutoModelForSequenceClassification, _bert(vocab_size=120, **_TINY_SIZES), lambda: ComeraConfig(rank=4)
    ),
    TINY_MASKED: _Case(AutoModelForMaskedLM, _roberta(vocab_size=120, **_TINY_SIZES), lambda: ComeraConfig(rank=4)),
    TINY_CAUSAL: _Case(AutoModelForCausalLM, _gpt2(**_TINY_GPT2), lambda: ComeraConfig(rank=4)),
    TINY_DECODER: _Case(AutoModelForCausalLM, _llama(vocab_size=512, **_TINY_SIZES), lambda: ComeraConfig(rank=4)),
}


def build_models(name: str, dropout: float, embedding_width: int | None = None) -> dict[str, PreTrainedModel]:
    """The tensor-train model, and the dense one that computes the same; with a width, a dense one that has it too.

    Raises:
        RuntimeError: If a model has not as many parameters as it should, or the logits of the two differ.
    """
    case = _CASES[name]
    config = case.new_config(dropout)
    shapes = dataclasses.replace(case.new_shapes(), embedding_width=embedding_width)
    tensor_train = get_comera_model(case.auto_class, shapes, config=config)
    models = {DENSE: copy.deepcopy(tensor_train).merge_and_unload(), TENSOR_TRAIN: tensor_train}
    if embedding_width is not None:
        embedding = next(layer.name for layer in tensor_train.comera_plan() if layer.width is not None)
        narrow = ComeraConfig(target_modules=[embedding], embedding_width=embedding_width)
        models[NARROW_DENSE] = get_comera_model(copy.deepcopy(models[DENSE]), narrow)
    if name == PAPER:
        _check_sizes(models)
    ids = torch.randint(config.vocab_size, (2, 16))
    with torch.no_grad():
        logits = {form: model.eval()(input_ids=ids).logits for form, model in models.items()}
    for found in logits.values():
        check_agreement("logits", found, logits[DENSE], 1e-4)
    return models


def random_ids(name: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids for a model, and labels as its task has them: classes, some of the tokens, or all of them."""
    case = _CASES[name]
    config = case.new_config(0.0)
    ids = torch.randint(config.vocab_size, (rows, length))
    if case.auto_class is AutoModelForSequenceClassification:
        return ids, torch.randint(config.num_labels, (rows,))
    if case.auto_class is AutoModelForMaskedLM:
        return ids, ids.masked_fill(torch.rand(ids.shape) >= HIDDEN_SHARE, IGNORED)
    return ids, ids


def _check_sizes(models: dict[str, PreTrainedModel]) -> None:
    for form, expected in ((TENSOR_TRAIN, TENSOR_TRAIN_PARAMETERS), (DENSE, DENSE_PARAMETERS)):
        found = size_report(models[form]).parameters
        if found != expected:
            raise RuntimeError(
                f"The {form} model has {found:,} parameters instead of {expected:,}: its factors or ranks are others."
            )


def print_plan(compression: CompressionPlan) -> None:
    """Layers of equal shape in one line each, and the whole model."""
    table = Table(title="Compressed layers and their parameters", title_justify="left")
    for heading in ("layers", "factors", "ranks", "dense, each", "tensor train"):
        table.add_column(heading, justify="left" if heading in ("factors", "ranks") else "right")
    groups: dict[tuple[tuple[int, ...], ...], list[LayerPlan]] = {}
    for layer in compression:
        groups.setdefault((layer.in_factors, layer.out_factors, layer.ranks), []).append(layer)
    for shape, layers in groups.items():
        in_factors, out_factors, ranks = (" ".join(map(str, sizes)) for sizes in shape)
        counts = f"{layers[0].dense_parameters:,}", f"{layers[0].parameters:,}"
        table.add_row(str(len(layers)), f"{in_factors} -> {out_factors}", ranks, *counts)
    table.add_section()
    table.add_row("", "whole model", "", f"{compression.dense_parameters:,}", f"{compression.parameters:,}")
    Console().print(table)
