"""The settings that every training script has: steps, rates, batches, checkpoints, trackers; and their ranges."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from hf_comera.memory.policy import NAMED_POLICIES

# Those that need no setting of their own.
SCHEDULES = ["linear", "cosine", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"]


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


_POSITIVE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs",
    "max_train_steps", "learning_rate", "max_grad_norm", "eval_steps", "logging_steps", "checkpointing_steps",
    "save_total_limit", "num_threads",
)  # fmt: skip
_NOT_NEGATIVE = ("num_warmup_steps", "weight_decay", "dataloader_num_workers")


def read_groups(parser: HfArgumentParser, argv: Sequence[str] | None) -> tuple[Any, ...]:
    """The settings of a command line, an object for each dataclass of ``parser``.

    Args:
        parser: Knows the dataclasses.
        argv: Arguments without the name of the program. None: those of this process.

    Raises:
        ValueError: If there is an option that no dataclass has.
    """
    arguments = None if argv is None else list(argv)
    *groups, unknown = parser.parse_args_into_dataclasses(args=arguments, return_remaining_strings=True)
    if unknown:
        name = unknown[0].partition("=")[0]
        known = [f"--{field.name}" for group in parser.dataclass_types for field in dataclasses.fields(group)]
        near = difflib.get_close_matches(name.replace("-", "_").replace("__", "--", 1), known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name} is not an option here.{hint}")
    return tuple(groups)


def check_ranges(values: Mapping[str, Any], *, positive: Sequence[str] = (), not_negative: Sequence[str] = ()) -> None:
    """Refuse values out of range among the settings of the loop and those that are named.

    Raises:
        ValueError: If there is one.
    """
    for name in (*positive, *_POSITIVE):
        if values[name] is not None and values[name] <= 0:
            raise ValueError(f"--{name} {values[name]} must be greater than 0.")
    for name in (*not_negative, *_NOT_NEGATIVE):
        if values[name] is not None and values[name] < 0:
            raise ValueError(f"--{name} {values[name]} must be 0 or greater.")


def check_files(**paths: str | None) -> None:
    """Refuse settings that name a file which is not there.

    Raises:
        ValueError: If there is one.
    """
    for name, path in paths.items():
        if path and not Path(path).is_file():
            raise ValueError(f"--{name} {path} is not a file here ({Path.cwd()}).")
