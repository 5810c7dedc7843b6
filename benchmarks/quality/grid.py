"""What names a run of the quality benchmark, and which runs a command asks for."""

import argparse
import dataclasses
import itertools
from dataclasses import dataclass

FORMS = ("dense", "tt")
FULL_RANK = 1_000_000  # clipped by the library to the largest rank that the factors can use
STEPS, SECONDS, BYTES = "steps", "seconds of dense", "bytes of tt"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: these values name its row, together with the machine."""

    task: str
    data: str
    form: str
    rank: str
    """``"full"`` or a number; of a dense run that of the twin it is compared to, or empty."""
    num_factors: int | str
    update: str
    lr: float
    other_lr: float
    width: int
    steps: int
    budget: str
    """``"steps"``: as many as said. ``"seconds of dense"``: as many as take the dense one's time. ``"bytes of tt"``:
    as many as said, of a model that is narrow enough for the tensor-train counterpart's bytes."""
    seed: int

    def __str__(self) -> str:
        """For progress bars and messages."""
        form = " ".join(filter(None, (self.form, self.rank)))
        budget = "" if self.budget == STEPS else f" ({self.budget})"
        return f"{self.task}: {form}{budget}, {self.update}, lr {self.lr:g}, width {self.width}, seed {self.seed}"

    def twin(self, **changes: object) -> "Run":
        """The same run with some values changed."""
        return dataclasses.replace(self, **changes)


RUN_COLUMNS = tuple(field.name for field in dataclasses.fields(Run))


def grid(arguments: argparse.Namespace, data: str, steps: int) -> list[Run]:
    """All combinations of the lists on the command line, each once, the last list varying fastest."""
    lists = (arguments.widths, arguments.forms, arguments.ranks, arguments.updates, arguments.lrs, arguments.seeds)
    runs = [_run(arguments, values, data=data, steps=steps) for values in itertools.product(*lists)]
    return list(dict.fromkeys(runs))


def _run(arguments: argparse.Namespace, values: tuple, *, data: str, steps: int) -> Run:
    width, form, rank, update, lr, seed = values
    budget = STEPS
    if form == "tt" and arguments.like_seconds_of:
        budget = SECONDS
    if form == "dense" and arguments.like_bytes_of:
        budget = BYTES
    has_ranks = form == "tt" or budget == BYTES
    return Run(
        task=arguments.task,
        data=data,
        form=form,
        rank=rank if has_ranks else "",
        num_factors=arguments.num_factors if has_ranks else "",
        update=update,
        lr=lr,
        other_lr=arguments.other_lr,
        width=width,
        steps=steps,
        budget=budget,
        seed=seed,
    )
