"""Model cards: write or refresh the ``README.md`` of a compressed model from measured values only.

``extend_trainer_cards``: ``Trainer.create_model_card`` overwrites the card in its folder, and has no hook for models
that are not PEFT's. Who downloads such a folder would have no hint at all. So the summary that it makes of a
compressed model, and of no other, adds hf_comera's part to its text.
"""

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import (
    HFValidationError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers import PreTrainedModel
from transformers.modelcard import TrainingSummary

from hf_comera.compress.reports import SizeReport, size_report
from hf_comera.compress.storage import storage_bits
from hf_comera.hub.model import TAGS, is_comera_model

__all__ = [
    "adopt_own_part",
    "check_repo_id",
    "extend_trainer_cards",
    "has_own_part",
    "require_compressed",
    "with_own_part",
    "write_model_card",
]

# Last part of a model's class name -> the Auto class that loads it and its task on the Hub, where that is certain.
TASKS = {
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "ForMultipleChoice": ("AutoModelForMultipleChoice", None),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
}

KIND_NAMES = {
    "tt_linear": "linear layer",
    "ttm_embedding": "embedding",
    "factorized_embedding": "factorized embedding",
}
METRIC_FIELDS = ("name", "value", "measured_on")
OWN_PART = re.compile(r"<!-- hf_comera:begin.*?<!-- hf_comera:end -->", re.DOTALL)
OWN_COMMENT = "<!-- hf_comera:"
LOCAL, LOCAL_COMMENT = ".", "  # the folder of this card"
"""What a card in a folder of this machine says to load, and the comment behind it."""


def write_model_card(
    model: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    training_data: str | None = None,
    metrics: Sequence[Mapping[str, Any]] | None = None,
    license: str | None = None,
    language: str | Sequence[str] | None = None,
    repo_id: str | None = None,
    training_command: str | None = None,
) -> Path:
    """Write ``README.md`` beside a saved model: a description, how to load it, its sizes, its ranks, how to merge it.

    Sizes and ranks are read off the model. Everything else comes from the arguments, or is left out. Of an existing
    ``README.md`` only the part between hf_comera's two comments is rewritten, or added where there is none. The rest
    of the text and the metadata that this call does not set stay.

    Args:
        model: A compressed model.
        save_directory: Folder of the card, usually the one given to ``save_pretrained``.
        base_model: Hub id or path of the model whose weights this one started from.
        training_data: One sentence about the data, in Markdown.
        metrics: Rows of ``{"name": ..., "value": ..., "measured_on": ...}``.
        license: Licence identifier of the Hub, such as ``"apache-2.0"``.
        language: Language code or codes, such as ``"en"`` or ``"code"``.
        repo_id: Hub id to load the model from. None: the card speaks of its own folder.
        training_command: The shell command that trained the model and printed the metrics.

    Returns:
        Path of the card.

    Raises:
        ValueError: If the model is not compressed, ``repo_id`` is no name of a repository, or a metric lacks a field.
            Also if a text has hf_comera's comments in it, or the existing card cannot be read.
    """
    require_compressed(model)
    if repo_id is not None:
        check_repo_id(repo_id)
    folder = Path(save_directory)
    metadata = ModelCardData(
        base_model=base_model if _is_hub_id(base_model) else None,
        language=language if language is None or isinstance(language, str) else list(language),
        library_name="transformers",
        license=license,
        pipeline_tag=_task(model)[1],
        tags=TAGS,
    )
    given: dict[str, Any] = {"base_model": base_model, "training_data": training_data}
    given |= {"training_command": training_command, "license": license, "metrics": _metric_rows(metrics or ())}
    fresh = _new_card(metadata, given | _loading_fields(model, folder, repo_id) | _measured_fields(model))
    path = folder / "README.md"
    card = _merge(_read(path), fresh, path) if path.exists() else fresh
    beside = path.with_name("README.md.part")
    card.save(beside)
    beside.replace(path)
    return path


def with_own_part(text: str, model: PreTrainedModel, folder: Path) -> str:
    """``text``, the card of a compressed model that someone else wrote for ``folder``, with hf_comera's part added.

    The part says how to load the model, its sizes and its ranks; :func:`write_model_card` rewrites it later.
    """
    unknown = dict.fromkeys(("base_model", "training_data", "training_command", "license", "metrics"))
    fields = unknown | _loading_fields(model, folder, None) | _measured_fields(model)
    fresh = _new_card(ModelCardData(tags=TAGS), fields)
    return str(_merge(ModelCard(text), fresh, folder / "README.md"))


def has_own_part(path: Path) -> bool:
    """Whether the card at ``path`` has a part that hf_comera wrote."""
    return OWN_PART.search(path.read_text(encoding="utf-8")) is not None


def adopt_own_part(path: Path, source: Path, repo_id: str) -> Path:
    """Write to ``path`` the card at ``source`` as it is to be on the Hub, where it loads from ``repo_id``.

    Of a card that is at ``path`` already the text outside hf_comera's part is kept.

    Raises:
        ValueError: If a card cannot be read, or has hf_comera's comments more than once.
    """
    fresh = _read(source)
    for comment in (LOCAL_COMMENT, ""):
        fresh.text = fresh.text.replace(f'from_pretrained("{LOCAL}"){comment}', f'from_pretrained("{repo_id}")')
    card = _merge(_read(path), fresh, path) if path.exists() else fresh
    card.save(path)
    return path


def check_repo_id(repo_id: str) -> None:
    """Refuse what cannot be the name of a repository: it becomes part of the card's Python.

    Raises:
        ValueError: If it is none.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(
            f"repo_id={repo_id!r} is no name of a repository on the Hub. Give 'user/name' or 'name', of letters, "
            "digits and '-', '_', '.', for example 'me/codebert-comera'."
        ) from error


def require_compressed(model: PreTrainedModel) -> None:
    """Refuse a model that has no tensor-train layers.

    Raises:
        ValueError: If ``model`` is not compressed.
    """
    if not is_comera_model(model):
        raise ValueError(
            f"model={type(model).__name__} has no tensor-train layers, so there is nothing to report. "
            "Compress it first: model = get_comera_model(model, ComeraConfig(rank=30))"
        )


def _new_card(metadata: ModelCardData, fields: dict[str, Any]) -> ModelCard:
    """The template, filled in.

    Raises:
        ValueError: If a field holds one of the two comments between which the part is found again.
    """
    template = files("hf_comera.hub").joinpath("model_card_template.md").read_text(encoding="utf-8")
    marked = [name for name, value in fields.items() if OWN_COMMENT in str(value)]
    if marked:
        raise ValueError(
            f"{marked[0]} holds {OWN_COMMENT!r}, with which hf_comera's part of a card begins and ends. Leave it out."
        )
    return ModelCard.from_template(metadata, template_str=template, **fields)


def _task(model: PreTrainedModel) -> tuple[str | None, str | None]:
    """Auto class and Hub task of the model's class, None where they are not certain."""
    name = type(model).__name__
    return next((task for suffix, task in TASKS.items() if name.endswith(suffix)), (None, None))


def _is_hub_id(base_model: str | None) -> bool:
    """Whether the metadata may name ``base_model``: the Hub refuses paths there."""
    if base_model is None or Path(base_model).exists():
        return False
    try:
        validate_repo_id(base_model)
    except HFValidationError:
        return False
    return True


def _cell(value: object) -> str:
    """``value`` as the text of one cell of a Markdown table."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _metric_rows(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    for metric in metrics:
        if set(metric) != set(METRIC_FIELDS):
            raise ValueError(
                f"metrics: {dict(metric)} has the fields {sorted(metric)}, needed are {sorted(METRIC_FIELDS)}, for "
                'example {"name": "held-out loss", "value": 3.21, "measured_on": "5% of the functions"}.'
            )
    return [{field: _cell(metric[field]) for field in METRIC_FIELDS} for metric in metrics]


def _loading_fields(model: PreTrainedModel, folder: Path, repo_id: str | None) -> dict[str, Any]:
    """Fields of the snippet that loads the model."""
    auto_class = _task(model)[0] or type(model).__name__
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    return {
        "title": (repo_id or folder.resolve().name).rpartition("/")[2],
        "model_class": type(model).__name__,
        "auto_class": auto_class,
        "imports": f"{auto_class}, AutoTokenizer" if has_tokenizer else auto_class,
        "has_tokenizer": has_tokenizer,
        "load_from": repo_id or LOCAL,
        "load_comment": "" if repo_id else LOCAL_COMMENT,
        "save_id": _save_id(folder),
    }


def _save_id(folder: Path) -> str | None:
    """The id that ``config.json`` in ``folder`` shares with the weight files; None where there is no such file yet."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return config.get("quantization_config", {}).get("save_id")


def _measured_fields(model: Any) -> dict[str, Any]:
    """Sizes and ranks, read off the model."""
    layers, storage = model.comera_plan().layers, model.config.quantization_config.storage
    kinds = Counter(layer.kind for layer in layers)
    counts = [f"{count} {KIND_NAMES[kind]}{'s' if count > 1 else ''}" for kind, count in sorted(kinds.items())]
    rows = [
        {"name": f"`{layer.name}`", "kind": KIND_NAMES[layer.kind]}
        | {field: ", ".join(map(str, getattr(layer, field))) for field in ("in_factors", "out_factors", "ranks")}
        for layer in layers
    ]
    return {
        "layer_summary": " and ".join(counts),
        "integers": " and ".join(sorted({f"int{bits}" for bits in storage_bits(model, storage).values()})),
        "layers": rows,
        "sizes": _size_rows(size_report(model)),
    }


def _size_rows(report: SizeReport) -> list[dict[str, str]]:
    rows = [
        ("parameters", report.dense_parameters, report.parameters),
        ("bytes", report.dense_bytes, report.stored_bytes),
        ("parameters of the compressed layers", report.compressed_dense_parameters, report.compressed_parameters),
    ]
    return [
        {"what": what, "dense": f"{dense:,}", "ours": f"{ours:,}", "ratio": f"{dense / ours:.1f}"}
        for what, dense, ours in rows
        if ours
    ]


def _read(path: Path) -> ModelCard:
    try:
        return ModelCard.load(path)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} starts with metadata that cannot be read; mend or remove it: {error}") from error


def _merge(card: ModelCard, fresh: ModelCard, path: Path) -> ModelCard:
    """``card``, which is at ``path``, with our part and our metadata taken from ``fresh``.

    Fields that the caller named win over existing metadata; the task, which is a guess from the class, does not.
    """
    found = OWN_PART.findall(card.text)
    if len(found) > 1 or card.text.count(OWN_COMMENT) != 2 * len(found):
        raise ValueError(
            f"{path} has hf_comera's comments more than once or only half. Keep one pair around the text to rewrite, "
            "'<!-- hf_comera:begin -->' and '<!-- hf_comera:end -->', or remove them all."
        )
    newline = "\r\n" if "\r\n" in card.text else "\n"
    part = OWN_PART.findall(fresh.text)[0].replace("\n", newline)
    text = card.text if found else f"{card.text.rstrip()}{newline * 2}{part}{newline}"
    card.text = OWN_PART.sub(lambda _: part, text)
    tags = list(dict.fromkeys([*card.data.get("tags", []), *TAGS]))
    task = card.data.get("pipeline_tag") or fresh.data.get("pipeline_tag")
    for key, value in (fresh.data.to_dict() | {"tags": tags, "pipeline_tag": task}).items():
        card.data[key] = value
    return card


@functools.cache
def extend_trainer_cards() -> None:
    """Have Transformers' summaries of training runs with compressed models tell how to load these; once a process."""
    original: Any = TrainingSummary.from_trainer

    @functools.wraps(original)
    def from_trainer(cls: type[TrainingSummary], trainer: Any, *args: Any, **kwargs: Any) -> TrainingSummary:
        summary = original.__func__(cls, trainer, *args, **kwargs)
        model = trainer.accelerator.unwrap_model(trainer.model)
        if is_comera_model(model):
            write = summary.to_model_card
            summary.to_model_card = lambda: with_own_part(write(), model, Path(trainer.args.output_dir))
        return summary

    TrainingSummary.from_trainer = classmethod(from_trainer)  # type: ignore[assignment, method-assign]
