"""The models that bench_step.py times: a tensor train, and the dense model that computes the same."""

import copy

import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertForSequenceClassification, PreTrainedModel

from hf_comera import ComeraConfig, CompressionPlan, get_comera_model, size_report
from hf_comera.compress import LayerPlan
from interleaved_timing import DENSE, TENSOR_TRAIN, check_agreement
from six_encoders import DENSE_PARAMETERS, TARGETS, TENSOR_TRAIN_PARAMETERS, paper_shapes, six_encoders

PAPER, LARGE = "bert-6x768", "bert-24x1024"
MODELS = (PAPER, LARGE)
_LARGE_SIZES = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
_LARGE_RANK = 64


def build_models(name: str, dropout: float) -> dict[str, PreTrainedModel]:
    """The tensor-train model, and the dense one that computes the same.

    Raises:
        RuntimeError: If a model has not as many parameters as it should, or the logits of the two differ.
    """
    config, shapes = _config(name, dropout), _shapes(name)
    tensor_train = get_comera_model(BertForSequenceClassification, shapes, config=config)
    models = {DENSE: copy.deepcopy(tensor_train).merge_and_unload(), TENSOR_TRAIN: tensor_train}
    if name == PAPER:
        _check_sizes(models)
    ids = torch.randint(config.vocab_size, (2, 16))
    with torch.no_grad():
        logits = {form: model.eval()(input_ids=ids).logits for form, model in models.items()}
    check_agreement("logits", logits[TENSOR_TRAIN], logits[DENSE], 1e-4)
    return models


def _config(name: str, dropout: float) -> BertConfig:
    sizes = _LARGE_SIZES if name == LARGE else {}
    return six_encoders(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes)


def _shapes(name: str) -> ComeraConfig:
    return paper_shapes() if name == PAPER else ComeraConfig(rank=_LARGE_RANK, target_modules=TARGETS)


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
