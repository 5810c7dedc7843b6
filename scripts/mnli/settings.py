"""The settings of train_mnli.py: what each one means, and which combinations cannot work."""

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
)

RATE, DENSE_RATE = (
    5e-4,
    3e-4,
)  # on such pairs at width 256 rank 32 is best at 1e-3, where rank 16 may not begin to learn

DESCRIPTION = """\
Train the six-encoder model of the CoMERA paper to tell whether one sentence follows from another (entailment), is
open (neutral), or cannot be true with it (contradiction): from random weights, in the paper's tensor-train shapes.
The checkpoint that is best on the validation pairs is kept and measured on the test pairs, all of them.
On MNLI, whose test labels are secret, both validation sets are the test, and a part of the training pairs chooses the
checkpoint. Premises of that part are in no training pair.
The rows in benchmarks/results/train_mnli.csv are of four encoders, at most 256 wide, on a mix of other public pairs.
They are not of MNLI, and not of six encoders: no figures of either are kept.
"""


@dataclass(kw_only=True)
class ModelSettings:
    """Which model, and in which form."""

    _argument_group_name = "model"

    config_overrides: str | None = setting(
        None,
        "Change the six-encoder BERT, e.g. "
        '"hidden_size=256,num_hidden_layers=4,num_attention_heads=4,intermediate_size=1024".',
    )
    rank: int | None = setting(
        None,
        "Largest tensor-train rank, with the library's factors. Default: the paper's factors and ranks where hidden "
        "size and FFN are the paper's, else 30.",
    )
    dense: bool = setting(False, "Train the uncompressed twin with the same data, loop and report.")
    tokenizer_name: str = setting("google-bert/bert-base-uncased", "Tokenizer (Hub name or folder).")


@dataclass(kw_only=True)
class DataSettings:
    """Which pairs of sentences. Give one of --dataset_name, --train_file and --data_file."""

    _argument_group_name = "data"

    dataset_name: str | None = setting(None, "Data set on the Hub or folder with one, e.g. nyu-mll/glue.")
    dataset_config: str | None = setting(None, "Configuration of that data set, e.g. mnli.")
    train_file: str | None = setting(
        None, "csv, tsv, json, jsonl or parquet with the columns premise, hypothesis and label (a name, or 0 to 2)."
    )
    validation_file: str | None = setting(None, "The same for the pairs that choose the checkpoint.")
    test_file: str | None = setting(None, "The same for the pairs the accuracy is reported on.")
    data_file: str | None = setting(None, "One such file with all pairs, see --fold_column.")
    fold_column: str = setting(
        "fold", "The column of --data_file that says train, validation (valid, dev) or test for each pair."
    )
    validation_split_percentage: int = setting(
        2, "Share of the training pairs that chooses the checkpoint where no others can, by a hash of the premise."
    )
    max_length: int = setting(128, "Tokens a pair; longer ones are cut. Batches are padded to their longest.")
    max_train_samples: int | None = setting(None, "Use only the first N training pairs, for a quick try.")
    max_eval_samples: int | None = setting(
        None, "While training, measure on N validation pairs from all over. The end measures all. Default: all."
    )


@dataclass(kw_only=True)
class TrainingSettings(RankSettings, LoopSettings):
    """How it is trained, watched and kept."""

    _argument_group_name = "training"

    output_dir: str = setting("outputs/mnli-comera", "Folder for checkpoints, model and figures.")
    per_device_train_batch_size: int = setting(128, "Pairs a device takes at a time.")
    per_device_eval_batch_size: int = setting(128, "The same while measuring.")
    learning_rate: float | None = setting(  # type: ignore[assignment]
        None, f"Peak rate, as for the dense model. Default: {RATE:g}, with --dense {DENSE_RATE:g}."
    )
    num_train_epochs: float | None = setting(30.0, "Passes over the training pairs; the paper's run has 30.")
    eval_steps: int | None = setting(None, "Measure on the validation pairs every N steps. Default: every epoch.")
    results_file: str | None = setting(
        None,
        "Add a row with the figures to this csv file, e.g. benchmarks/results/train_mnli.csv, of which "
        "python -m benchmarks.quality.mnli_table prints a table.",
    )


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
    settings = Settings(*read_groups(groups, argv, prog="train_mnli.py", description=DESCRIPTION))
    if settings.training.learning_rate is None:
        settings.training.learning_rate = DENSE_RATE if settings.model.dense else RATE
    _check_sources(settings.data)
    check_ranges(settings.as_dict(), positive=("rank", "max_train_samples", "max_eval_samples"))
    if settings.model.dense and settings.model.rank is not None:
        raise ValueError(f"--rank {settings.model.rank} is of tensor trains, which --dense has none of. Give one.")
    check_graphs(settings.training)
    check_ranks(settings.training, settings.model.dense)
    share = settings.data.validation_split_percentage
    if not 0 < share < 100:
        raise ValueError(f"--validation_split_percentage {share} must lie between 0 and 100, for example 2.")
    return settings


def _check_sources(data: DataSettings) -> None:
    sources = {name: getattr(data, name) for name in ("dataset_name", "train_file", "data_file")}
    given = [f"--{name} {value}" for name, value in sources.items() if value]
    if len(given) != 1:
        raise ValueError(
            f"{' and '.join(given) or 'No data'} given, but the pairs must come from one source: "
            "--dataset_name nyu-mll/glue --dataset_config mnli, or --train_file pairs.csv, or --data_file pairs.csv."
        )
    for name in ("validation_file", "test_file"):
        if getattr(data, name) and not data.train_file:
            raise ValueError(f"--{name} {getattr(data, name)} needs --train_file beside it, not {given[0]}.")
    if data.dataset_config and not data.dataset_name:
        raise ValueError(f"--dataset_config {data.dataset_config} needs --dataset_name, for example nyu-mll/glue.")
    if data.max_length < 8:
        raise ValueError(f"--max_length {data.max_length} leaves no room for two sentences. Use at least 8, e.g. 128.")
    check_files(
        train_file=data.train_file,
        validation_file=data.validation_file,
        test_file=data.test_file,
        data_file=data.data_file,
    )
