"""The settings that every training script has: steps, rates, batches, ranks, checkpoints, trackers; their ranges."""

import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import HfArgumentParser

from hf_comera import RankAdaptation, size_report
from hf_comera.memory.policy import NAMED_POLICIES

# Those that need no setting of their own.
SCHEDULES = ["linear", "cosine", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"]
_POSITIVE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "max_train_steps", "learning_rate", "max_grad_norm", "eval_steps", "logging_steps", "checkpointing_steps",
    "save_total_limit", "num_threads",
)  # fmt: skip
_NOT_NEGATIVE = ("num_warmup_steps", "weight_decay", "dataloader_num_workers")
_WANTED = ("target_ratio", "target_parameters", "target_core_ratio")


def setting(default: Any, help_text: str, **metadata: Any) -> Any:
    """A dataclass field whose help text `--help` shows."""
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass(kw_only=True)
class LoopSettings:
    """How a model is trained, watched and kept; a script derives its own from these."""

    output_dir: str = setting("outputs", "Folder for checkpoints, model and figures.")
    overwrite_output_dir: bool = setting(False, "Start over although the folder holds checkpoints: they are deleted.")
    per_device_train_batch_size: int = setting(16, "Sequences a device takes at a time.")
    per_device_eval_batch_size: int = setting(32, "The same while measuring the held-out loss.")
    gradient_accumulation_steps: int = setting(1, "Batches whose gradients are added up for one step.")
    optimizer: str = setting(
        "tt_muon",
        "tt_muon: orthogonalised momentum for the cores, AdamW for the rest. adamw: AdamW with a rate for each core. "
        "coat_adamw: the same with its state in FP8.",
        choices=["tt_muon", "adamw", "coat_adamw"],
    )
    activation_policy: str = setting(
        "keep",
        "What layers keep for backward. rank: what is cheap to make again is not kept, with the same gradients. "
        "rank+fp8: the rest in FP8. fp8: all in FP8.",
        choices=list(NAMED_POLICIES),
    )
    learning_rate: float = setting(2e-3, "Peak rate, as for the dense model; the cores get theirs from it.")
    weight_decay: float = setting(0.01, "Decay of AdamW; biases and norms have none.")
    max_grad_norm: float = setting(1.0, "Gradients are cut to this norm.")
    lr_scheduler_type: str = setting("linear", "Course of the learning rate.", choices=SCHEDULES)
    num_warmup_steps: int | None = setting(
        None, "Steps over which the rate rises to its peak. Default: a tenth of the training."
    )
    num_train_epochs: float | None = setting(None, "Passes over the training data.")
    max_train_steps: int | None = setting(None, "Steps in all; replaces --num_train_epochs.")
    eval_steps: int | None = setting(250, "Measure the held-out loss every N steps.")
    logging_steps: int = setting(10, "Renew the progress bar and the tracker every N steps.")
    checkpointing_steps: int | None = setting(
        None,
        "Write a checkpoint every N steps. Default: only when the run is interrupted, removed once it is complete.",
    )
    save_total_limit: int = setting(2, "Checkpoints that are kept, the newest ones.")
    resume_from_checkpoint: str | None = setting(None, 'Continue from this checkpoint folder, or from the "latest".')
    seed: int = setting(42, "Decides all that is random: initial weights, order of the data, dropout, masks.")
    mixed_precision: str | None = setting(
        None, "no, fp16 or bf16. Default: as given to accelerate launch.", choices=["no", "fp16", "bf16"]
    )
    use_cpu: bool = setting(False, "Train on the CPU although there is a GPU.")
    num_threads: int | None = setting(
        None, "CPU threads a process computes with. Default: all cores, shared out among the processes."
    )
    cuda_graphs: bool = setting(
        False, "Replay training steps as CUDA graphs, one for each of eight lengths that batches are padded to."
    )
    kernels: bool = setting(False, "Use the CUDA kernels of hf_comera where they can run.")
    fp8: bool = setting(
        False, "Multiply in FP8 in dense linear layers of at least 2048 features, on GPUs that can (sm_89 and newer)."
    )
    dataloader_num_workers: int = setting(0, "Processes that prepare batches ahead; the numbers stay the same.")
    with_tracking: bool = setting(False, "Log to a tracker, see --report_to.")
    report_to: str = setting("all", "tensorboard, wandb, trackio, ... or all that are installed.")


@dataclass(frozen=True)
class SettingGroups:
    """The settings of a script: of the model, the data and the training."""

    model: Any
    data: Any
    training: LoopSettings

    def as_dict(self) -> dict[str, Any]:
        """All settings by name, ready for JSON."""
        groups = (self.model, self.data, self.training)
        return {name: value for group in groups for name, value in dataclasses.asdict(group).items()}


def read_groups(groups: Sequence[type], argv: Sequence[str] | None, **options: Any) -> tuple[Any, ...]:
    """The settings of a command line, an object for each dataclass.

    Args:
        groups: The dataclasses.
        argv: Arguments without the name of the program. None: those of this process.
        options: Of the parser.

    Raises:
        ValueError: If there is an option that no dataclass has, such as the abbreviation of one.
    """
    parser = HfArgumentParser(groups, allow_abbrev=False, **options)
    arguments = None if argv is None else list(argv)
    *settings, unknown = parser.parse_args_into_dataclasses(args=arguments, return_remaining_strings=True)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = [f"--{field.name}" for group in groups for field in dataclasses.fields(group)]
        near = difflib.get_close_matches(name.replace("-", "_").replace("__", "--", 1), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name} is not an option here.{hint}")
    return tuple(settings)


def check_ranges(values: Mapping[str, Any], *, positive: Sequence[str] = (), not_negative: Sequence[str] = ()) -> None:
    """Refuse values out of range among the settings of the loop, where there are such, and those that are named.

    Raises:
        ValueError: If there is one.
    """
    positive = (*positive, *(name for name in _POSITIVE if name in values))
    not_negative = (*not_negative, *(name for name in _NOT_NEGATIVE if name in values))
    for name in positive:
        if values[name] is not None and values[name] <= 0:
            raise ValueError(f"--{name} {values[name]} must be greater than 0.")
    for name in not_negative:
        if values[name] is not None and values[name] < 0:
            raise ValueError(f"--{name} {values[name]} must be 0 or greater.")


def check_graphs(training: LoopSettings) -> None:
    """Refuse CUDA graphs with what they cannot hold.

    Raises:
        ValueError: If gradients are accumulated or losses are scaled.
    """
    if training.cuda_graphs and training.gradient_accumulation_steps > 1:
        raise ValueError(
            f"--cuda_graphs makes a step of one batch, and --gradient_accumulation_steps "
            f"{training.gradient_accumulation_steps} of several. Use a larger --per_device_train_batch_size instead."
        )
    if training.cuda_graphs and training.mixed_precision == "fp16":
        raise ValueError(
            "--cuda_graphs does not go with --mixed_precision fp16, whose scaler asks the host. "
            "Use --mixed_precision bf16."
        )


def check_files(**paths: str | None) -> None:
    """Refuse settings that name a file which is not there.

    Raises:
        ValueError: If there is one.
    """
    for name, path in paths.items():
        if path and not Path(path).is_file():
            raise ValueError(f"--{name} {path} is not a file here ({Path.cwd()}).")


@dataclass(kw_only=True)
class RankSettings:
    """Whether and how ranks are trained; part of the settings of the training."""

    adapt_ranks: bool = setting(
        False, "Train the ranks with the task and cut dead ones. One of the three targets below implies it."
    )
    target_ratio: float | None = setting(
        None, "Wanted size: parameters of the model over those of the dense model, e.g. 0.02. It is met exactly."
    )
    target_parameters: int | None = setting(None, "The same as a number of parameters, e.g. 1500000.")
    target_core_ratio: float | None = setting(
        None, "The same as core parameters over those the model starts with, e.g. 0.5."
    )
    early_stage: float = setting(
        0.4, "Length of the early stage, before the first cut for size: a part of the training, or steps if above 1."
    )
    late_stage: float = setting(
        0.3, "Length of the late stage, in which the size falls to the wanted one; likewise. Ranks then stay."
    )


def wants_adaptation(settings: RankSettings) -> bool:
    """Whether ranks are to be trained."""
    return settings.adapt_ranks or any(getattr(settings, name) is not None for name in _WANTED)


def check_ranks(settings: RankSettings, dense: bool) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        ValueError: If more than one target is given, one is out of range, stages are given without anything to train,
            or the model is dense.
    """
    targets = [f"--{name} {getattr(settings, name)}" for name in _WANTED if getattr(settings, name) is not None]
    if len(targets) > 1:
        raise ValueError(f"{' and '.join(targets)} are given. Give the one that you know.")
    if dense and wants_adaptation(settings):
        raise ValueError(f"{_asked_by(settings)} is for tensor trains, which --dense has none of. Give one.")
    ratio = settings.target_core_ratio
    if ratio is not None and not 0 < ratio <= 1:
        raise ValueError(f"--target_core_ratio {ratio} must be above 0 and at most 1, for example 0.5.")
    for name in ("early_stage", "late_stage"):
        _check_stage(name, settings)
    _settings(settings, settings.target_parameters)


def _check_stage(name: str, settings: RankSettings) -> None:
    length = getattr(settings, name)
    if not (0 <= length <= 1 or (math.isfinite(length) and length > 1 and length == int(length))):
        raise ValueError(
            f"--{name} {length:g} is neither a part of the training (0 to 1, for example 0.3) nor a whole number "
            "of steps (above 1, for example 1000)."
        )
    if length != getattr(RankSettings, name) and not wants_adaptation(settings):
        raise ValueError(
            f"--{name} {length:g} is of rank adaptation, which nothing asks for. Give --adapt_ranks with it, or a "
            "wanted size, for example --target_ratio 0.02."
        )


def _asked_by(settings: RankSettings) -> str:
    """The option that asks for rank adaptation, as it is typed."""
    targets = [f"--{name} {getattr(settings, name)}" for name in _WANTED if getattr(settings, name) is not None]
    return targets[0] if targets else "--adapt_ranks"


def rank_adaptation(settings: RankSettings, model: nn.Module) -> RankAdaptation | None:
    """What rank adaptation needs to know, for a compressed ``model`` as it starts; None if ranks stay."""
    if not wants_adaptation(settings):
        return None
    parameters = settings.target_parameters
    if settings.target_core_ratio is not None:
        sizes = size_report(model)
        others = sizes.parameters - sizes.compressed_parameters
        parameters = others + int(settings.target_core_ratio * sizes.compressed_parameters)
    return _settings(settings, parameters)


def _settings(settings: RankSettings, parameters: int | None) -> RankAdaptation:
    return RankAdaptation(
        target_ratio=settings.target_ratio, target_parameters=parameters,
        early=_steps(settings.early_stage), late=_steps(settings.late_stage),
    )  # fmt: skip


def _steps(length: float) -> int | float:
    return int(length) if length > 1 else length


@contextmanager
def naming_the_option(settings: RankSettings) -> Iterator[None]:
    """Within, what rank adaptation refuses, such as an impossible size, begins with the option that asked for it."""
    try:
        yield
    except ValueError as problem:
        if str(problem).startswith("target_"):
            raise ValueError(f"{_asked_by(settings)}: {problem}") from problem
        raise


def describe_ranks(settings: RankSettings) -> str:
    """How ranks are trained, in a few words for tables; empty if they stay as they are."""
    if not wants_adaptation(settings):
        return ""
    wanted = [f"{name}={getattr(settings, name)}" for name in _WANTED if getattr(settings, name) is not None]
    stages = f"early {settings.early_stage:g}, late {settings.late_stage:g}"
    return f"{wanted[0] if wanted else 'no wanted size'} ({stages})"
