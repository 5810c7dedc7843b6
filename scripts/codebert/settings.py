"""The settings of pretrain_codebert.py: what each one means, and which combinations cannot work."""

from collections.abc import Sequence
from dataclasses import dataclass

from loop.settings import (
    LoopSettings,
    RankSettings,
    SettingGroups,
    check_files,
    check_graphs,
    check_ranges,
    check_ranks,
    read_groups,
    setting,
    wants_adaptation,
)

DEMO_STEPS = 4000  # six to eight minutes of the demo's model on two CPU cores
DEMO_CORE_RATIO = 0.5

DESCRIPTION = """\
Pre-train a masked language model on code in tensor-train form, as CodeBERT is trained: docstring, separator, code.
Without any option it is the demo: a small RoBERTa on the functions of this Python's standard library, some minutes
on a CPU, whose ranks are trained too, to half of the core parameters (--target_core_ratio 1 keeps them all).
Several processes on one CPU: torchrun --nproc_per_node 2 scripts/pretrain_codebert.py --use_cpu
"""


@dataclass(kw_only=True)
class ModelSettings:
    """Which model, and in which form."""

    _argument_group_name = "model"

    model_name_or_path: str | None = setting(
        None, "Start from these weights (Hub name or folder): compressed by TT-SVD, or as they are with --dense."
    )
    config_name: str | None = setting(
        None, "Start from random weights in the shape of this model (Hub name or folder). Default: a small RoBERTa."
    )
    config_overrides: str | None = setting(
        None, 'Change the configuration of a model with random weights, e.g. "hidden_size=512,num_hidden_layers=6".'
    )
    rank: int = setting(30, "Largest tensor-train rank: larger learns more and shrinks less.")
    dense: bool = setting(False, "Train the uncompressed twin with the same data, loop and report.")
    tokenizer_name: str | None = setting(
        None,
        "Tokenizer (Hub name or folder). Default: the one of --model_name_or_path or --config_name; "
        "with neither, a byte-level BPE is trained on the training data.",
    )
    vocab_size: int | None = setting(
        None, "Train a byte-level BPE with this many tokens on the training data. Default of the demo: 4096."
    )


@dataclass(kw_only=True)
class DataSettings:
    """Which text, and how it becomes sequences."""

    _argument_group_name = "data"

    dataset_name: str | None = setting(
        None,
        "Data set on the Hub or folder with one, e.g. code-search-net/code_search_net. Default: standard library.",
    )
    dataset_config_name: str | None = setting(None, "Configuration of that data set, e.g. python.")
    train_file: str | None = setting(
        None,
        "json, jsonl, parquet or txt. Columns: code and docstring, or func_code_string and "
        "func_documentation_string, or text.",
    )
    validation_file: str | None = setting(
        None, "Held-out file of the same kind. Default: a part of the training data."
    )
    validation_split_percentage: int = setting(
        5, "Share of the data held out where the data has no split of its own, chosen by a hash of the content."
    )
    max_seq_length: int | None = setting(
        None,
        "Tokens a sequence, separators included; longer ones are cut. Default: 128, or what the model takes if that "
        "is less (64 in the demo).",
    )
    line_by_line: bool = setting(False, "For text: one line is one sequence. Default: lines are joined and cut.")
    mlm_probability: float = setting(
        0.3,
        "Share of the tokens the model has to guess. BERT and CodeBERT used 0.15; more teaches a small model faster.",
    )
    max_train_samples: int | None = setting(None, "Use only the first N training rows, for a quick try.")
    max_eval_samples: int | None = setting(192, "Held-out sequences the held-out loss is measured on.")
    preprocessing_num_workers: int | None = setting(None, "Processes that turn text into tokens.")


@dataclass(kw_only=True)
class TrainingSettings(RankSettings, LoopSettings):
    """How it is trained, watched, kept and published."""

    _argument_group_name = "training"

    output_dir: str = setting("outputs/codebert-comera", "Folder for checkpoints, model, picture and figures.")
    num_train_epochs: float | None = setting(
        None, f"Passes over the training data. Default: as many as make {DEMO_STEPS} steps, the length of the demo."
    )
    speed_comparison_steps: int = setting(
        15, "At the end, time this many steps of the model and of its dense baseline in turns. 0: do not."
    )
    push_to_hub: bool = setting(False, "Publish the finished model.")
    hub_model_id: str | None = setting(
        None, "Repository to publish to, e.g. me/codebert-comera. Default: the folder's name."
    )
    hub_private_repo: bool = setting(False, "Make that repository private.")


@dataclass(frozen=True)
class Settings(SettingGroups):
    """The three groups together."""

    model: ModelSettings
    data: DataSettings
    training: TrainingSettings


def parse_settings(argv: Sequence[str] | None = None) -> Settings:
    """Read the command line and refuse what cannot work, before anything is loaded.

    Args:
        argv: Arguments without the name of the program. None: those of this process.

    Raises:
        ValueError: If a setting is unknown, out of range or contradicts another.
    """
    groups = (ModelSettings, DataSettings, TrainingSettings)
    settings = Settings(*read_groups(groups, argv, prog="pretrain_codebert.py", description=DESCRIPTION))
    _check_sources(settings.model, settings.data)
    _check_ranges(settings)
    demo = not (settings.model.model_name_or_path or settings.model.config_name or settings.model.dense)
    if demo and not wants_adaptation(settings.training):
        settings.training.target_core_ratio = DEMO_CORE_RATIO
    check_graphs(settings.training)
    check_ranks(settings.training, settings.model.dense)
    return settings


def _check_sources(model: ModelSettings, data: DataSettings) -> None:
    if model.model_name_or_path and model.config_name:
        raise ValueError(
            f"--model_name_or_path {model.model_name_or_path} starts from trained weights and --config_name "
            f"{model.config_name} from random ones. Give one of them."
        )
    if model.config_overrides and model.model_name_or_path:
        raise ValueError(
            "--config_overrides changes a model with random weights. Give --config_name with it, or neither."
        )
    if model.tokenizer_name and model.vocab_size:
        raise ValueError(
            f"--tokenizer_name {model.tokenizer_name} is loaded as it is and --vocab_size {model.vocab_size} asks to "
            "train one. Give one of them."
        )
    if model.model_name_or_path and model.vocab_size:
        raise ValueError(
            "--vocab_size trains a new tokenizer, whose ids mean nothing to the weights of --model_name_or_path."
        )
    if data.dataset_name and data.train_file:
        raise ValueError(f"--dataset_name {data.dataset_name} and --train_file {data.train_file}: give one of them.")
    if data.validation_file and not data.train_file:
        raise ValueError(f"--validation_file {data.validation_file} needs --train_file beside it.")
    check_files(train_file=data.train_file, validation_file=data.validation_file)


def _check_ranges(settings: Settings) -> None:
    values = settings.as_dict()
    check_ranges(
        values,
        positive=("rank", "vocab_size", "max_train_samples", "max_eval_samples"),
        not_negative=("speed_comparison_steps",),
    )
    if not 0 < settings.data.mlm_probability < 1:
        raise ValueError(
            f"--mlm_probability {settings.data.mlm_probability} must lie between 0 and 1, for example 0.15."
        )
    if not 0 < settings.data.validation_split_percentage < 100:
        raise ValueError(
            f"--validation_split_percentage {settings.data.validation_split_percentage} must lie between 0 and 100, "
            "for example 5."
        )
