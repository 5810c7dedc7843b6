"""The settings of compress_pretrained.py: what each one means, and which values cannot work."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_comera.compress.budget import Budget, parse_budget
from loop.measure import program
from loop.settings import check_ranges, read_groups, setting

SCRIPT = "scripts/compress_pretrained.py"
DESCRIPTION = """\
Compress a trained model to a wanted size, and heal it: the dense model teaches the compressed one on texts like those
that it will see, without labels. The checkpoint loads as any other after "import hf_comera".
The same command again goes on where it was stopped.
"""


@dataclass(kw_only=True)
class Settings:
    """All settings of a run."""

    model: str = field(metadata={"help": "The dense model with its tokenizer: a folder, or a name on the Hub."})
    texts: list[str] = field(
        metadata={"help": "Files of texts: .txt with one a line; .csv, .tsv, .json, .jsonl or .parquet with --column."}
    )
    budget: str = setting(
        "0.25", "Wanted size: 0.25 (part of the parameters), 5.7M (parameters) or 8MB (bytes of the checkpoint)."
    )
    storage: str = setting(
        "int8", "How weights are stored: int8 or int4 with scales, or none: as they are.",
        choices=["int8", "int4", "none"],
    )  # fmt: skip
    minutes: float = setting(30.0, "Time for the healing; 0: none. Its first seconds tell how many steps that is.")
    max_steps: int | None = setting(None, "Steps of the healing in place of --minutes, the same on any machine.")
    output_dir: str = setting("outputs/compressed", "Folder for the checkpoint, its card, figures and picture.")
    overwrite_output_dir: bool = setting(False, "Start over although the folder holds a run.")
    column: str = setting("text", "The column of the texts in files that have columns.")
    held_out_percentage: int = setting(5, "Share of the texts that measures the quality, by a hash of each text.")
    max_held_out: int = setting(500, "Measure on no more than so many of them.")
    calibration_texts: int = setting(1600, "Texts of the calibration: the first ones for training.")
    max_length: int = setting(128, "Tokens of a text in the healing; longer ones are cut.")
    pooling: str = setting("mean", "How a sentence encoder makes one embedding of tokens.", choices=["mean", "cls"])
    per_device_train_batch_size: int = setting(64, "Texts of a step of the healing.")
    learning_rate: float = setting(5e-4, "Peak rate of the healing; small, since it starts near its end.")
    eval_steps: int | None = setting(None, "Measure, and write a checkpoint, every N steps. Default: ten times.")
    logging_steps: int = setting(10, "Renew the progress bar every N steps.")
    speed_rounds: int = setting(5, "Rounds of the comparison of speed at the end; 0: none.")
    seed: int = setting(42, "Decides the order of the texts.")
    use_cpu: bool = setting(False, "Compute on the CPU although there is a GPU.")
    num_threads: int | None = setting(None, "CPU threads to compute with. Default: all cores.")

    @property
    def size(self) -> Budget:
        """The budget as it was meant."""
        return parse_budget(self.budget)

    @property
    def heals(self) -> bool:
        """Whether there is any healing."""
        return self.max_steps is not None or self.minutes > 0

    def as_dict(self) -> dict[str, Any]:
        """All settings by name, ready for JSON."""
        return dataclasses.asdict(self)


def parse_settings(argv: Sequence[str] | None = None) -> Settings:
    """Read the command line and refuse what cannot work, before anything is loaded.

    Args:
        argv: Arguments without the name of the program. None: those of this process.

    Raises:
        ValueError: If a setting is unknown or out of range.
    """
    (settings,) = read_groups((Settings,), argv, prog="compress_pretrained.py", description=DESCRIPTION)
    parse_budget(settings.budget)
    check_ranges(
        settings.as_dict(),
        positive=("max_steps", "max_held_out", "calibration_texts", "max_length"),
        not_negative=("minutes", "speed_rounds"),
    )
    share = settings.held_out_percentage
    if not 0 < share < 100:
        raise ValueError(f"--held_out_percentage {share} must lie between 0 and 100, for example 5.")
    return settings


def command_line(arguments: Sequence[str]) -> str:
    """The command of this run, which also goes on with it."""
    return shlex.join([*program(SCRIPT), *(word for word in arguments if word != "--overwrite_output_dir")])
