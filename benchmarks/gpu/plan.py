"""What the GPU report does, as data: its steps in order of value, with their limits, on a GPU and in a rehearsal.

Nothing of the library is imported here, so that the process that watches the others needs none of it.
"""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["REHEARSED_DEVICES", "STEPS", "Step", "find_step", "steps"]

REHEARSED_DEVICES = [{"name": "rehearsed GPU", "capability": [9, 0], "gigabytes": 80}]
"""What a rehearsal believes to find, unless it is told otherwise."""
TREATMENTS = (
    *("eager", "graphs", "graphs and kernels", "kernels", "compiled", "compiled and graphs"),
    "graphs and kernels, padded",
)
FP8 = "FP8 products (compute capability 8.9)"
KERNELS = "our kernels (compute capability 8.0)"
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A process of its own, begun again where it dies, for the cases that are left."""

    name: str
    kind: str
    """A key of ``KINDS`` in worker.py."""
    seconds: int
    """The most that all of it may take; the seconds of all steps are those of the report."""
    case_seconds: int
    """The most that a case may take before the process is ended."""
    expected: int = 10
    """What a case may well take: none is begun with less time left."""
    needs: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    rehearsed: dict[str, Any] = field(default_factory=dict)
    """Settings that a rehearsal changes."""

    def settings_for(self, rehearsal: bool) -> dict[str, Any]:
        """Of a GPU, or of a rehearsal."""
        return self.settings | (self.rehearsed if rehearsal else {})


def tests(name: str, seconds: int, paths: list[str], rehearsed: list[str], **others: Any) -> Step:
    """Tests marked ``gpu``; in a rehearsal a few that are not."""
    return Step(
        name=name, kind="tests", seconds=seconds, case_seconds=120, expected=5,
        settings={"paths": paths, "mark": "gpu"},
        rehearsed={"paths": rehearsed, "mark": "not gpu and not slow and not network"}, **others,
    )  # fmt: skip


def sanitized(tool: str, seconds: int) -> Step:
    """Tests of the kernels under one tool of compute-sanitizer, some of each function first."""
    captures = "not captured" if tool in ("memcheck", "initcheck") else ""
    return Step(
        name=f"sanitizer-{tool}", kind="tests", seconds=seconds, case_seconds=120, expected=15,
        needs=(KERNELS, SANITIZER),
        settings={"paths": ["tests/kernels"], "mark": "gpu", "tool": tool, "keyword": captures, "spread": True},
        rehearsed={
            "paths": ["tests/kernels/test_tt_halves.py"], "mark": "not gpu", "keyword": "refuses or nothing",
        },
    )  # fmt: skip


def kernels(name: str, seconds: int, formats: list[str]) -> Step:
    """Our kernels against plain torch and dense layers."""
    return Step(
        name=name, kind="kernels", seconds=seconds, case_seconds=60, expected=8, needs=(KERNELS,),
        settings={"formats": formats, "rounds": 31}, rehearsed={"formats": formats[:1], "rounds": 1},
    )  # fmt: skip


def training(name: str, seconds: int, model: str, batch: str, tiny: str, **settings: Any) -> Step:
    """Whole training steps, tensor train and dense in turns, each with the same treatment."""
    return Step(
        name=name, kind="training", seconds=seconds, case_seconds=180, expected=25,
        settings={
            "model": model, "batch": batch, "dtype": "bf16", "dropout": 0.1, "rounds": 15, "treatments": TREATMENTS,
            **settings,
        },
        rehearsed={"model": tiny, "batch": "2x8", "rounds": 1},
    )  # fmt: skip


STEPS = (
    Step(
        name="environment",
        kind="environment",
        seconds=150,
        case_seconds=140,
        expected=1,
    ),
    tests("tests-kernels", 210, ["tests/kernels"], ["tests/kernels/test_coat_adamw.py"], needs=(KERNELS,)),
    kernels("kernels-bf16", 180, ["bf16"]),
    Step(
        name="losses",
        kind="losses",
        seconds=210,
        case_seconds=90,
        expected=20,
        settings={"tiny": False, "steps": 40},
        rehearsed={"tiny": True, "steps": 8},
    ),
    training("step-32x128", 180, "bert-6x768", "32x128", "tiny-bert"),
    Step(
        name="optimizers",
        kind="optimizers",
        seconds=50,
        case_seconds=40,
        settings={"sizes": [(1024, 1024)] * 100, "rounds": 31},
        rehearsed={"sizes": [(8, 128)] * 2, "rounds": 1},
    ),
    sanitized("memcheck", 180),
    sanitized("racecheck", 120),
    training("step-128x128", 110, "bert-6x768", "128x128", "tiny-bert"),
    training("step-24-layers", 210, "bert-24x1024", "16x512", "tiny-bert"),
    training("decoder-block", 130, "llama-1x4096", "2x2048", "tiny-llama"),
    Step(
        name="fp8-linears",
        kind="fp8",
        seconds=110,
        case_seconds=60,
        needs=(FP8,),
        settings={
            "shapes": [(8192, 1024, 4096), (8192, 4096, 4096), (8192, 4096, 11008)],
            "min_features": 1024,
            "model": "llama-1x4096",
            "batch": "2x2048",
            "rounds": 15,
        },
        rehearsed={"shapes": [(16, 32, 64)], "min_features": 16, "model": "tiny-llama", "batch": "2x8", "rounds": 1},
    ),
    training("step-mlm", 140, "roberta-12x768", "8x512", "tiny-roberta"),
    training("step-clm", 140, "gpt2-12x768", "8x512", "tiny-gpt2"),
    tests(
        "tests-other",
        90,
        ["tests/training", "tests/ops", "tests/optim", "tests/modules", "tests/integration"],
        ["tests/ops/test_bit_dropout_masks.py"],
    ),
    sanitized("synccheck", 50),
    sanitized("initcheck", 70),
    kernels("kernels-float32", 70, ["tf32", "fp32"]),
)
"""In order of value: what is learnt first is worth most when the time is up."""


def steps(only: list[str]) -> list[Step]:
    """All steps, or those whose names are given.

    Raises:
        ValueError: If there is none of a name.
    """
    for name in only:
        find_step(name)
    return [step for step in STEPS if not only or step.name in only]


def find_step(name: str) -> Step:
    """The step of that name.

    Raises:
        ValueError: If there is none.
    """
    found = next((step for step in STEPS if step.name == name), None)
    if found is None:
        names = ", ".join(step.name for step in STEPS)
        raise ValueError(f"There is no step {name!r}. Needed: one of {names}; for example ONLY={STEPS[0].name}.")
    return found
