"""Measure CoatAdamW's FP8 moments: errors on moments of a real training, bytes of state, seconds of a step.

    python -m benchmarks.quality.optimizer_states
    python -m benchmarks.quality.optimizer_states --steps 30 --width 64 --no-save

`--help` says what is measured and how to read the figures.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from tqdm import tqdm

from benchmarks.harness.timing import RESULTS, benchmark_parser, positive_integer
from benchmarks.quality.grid import STEPS, Run
from benchmarks.quality.tasks import Task, bytes_task
from benchmarks.quality.training import Trainer
from hf_comera import CoatAdamW
from hf_comera.ops.fp8 import decode, encode
from hf_comera.optim.flat_groups import FlatGroups, layout_of
from loop.measure import MACHINE_IDENTITY, Timings, machine, replace_rows, time_interleaved

Moments = tuple[Tensor, Tensor]
"""Groups of first and of second moments, both without the bias that they begin with."""

ROUNDINGS: dict[str, tuple[str, str]] = {
    "plain": ("e4m3", "e4m3"),
    "second_expanded": ("e4m3", "expanded"),
    "first_expanded": ("expanded", "e4m3"),
    "both_expanded": ("expanded", "expanded"),
    "plain_e5m2_second": ("e4m3", "e5m2"),
}
"""How the first and the second moment are rounded, under the name of the figure."""

_E5M2_LARGEST, _E5M2_SMALLEST = 57344.0, 2.0**-16
DESCRIPTION = """\
What does it cost and save to keep AdamW's moments in FP8? Trains GPT-2 with
three layers on the bytes of standard library modules (task bytes of
benchmarks.quality) with AdamW in float32, dense and in tensor-train form, and
takes its moments m and v at the end, each over 1 - beta ** steps.

Errors: a step of AdamW goes along u = m / (sqrt(v) + 1e-8). With moments that
were rounded it goes along u'. The error is the sum of (u' - u)^2 over the sum
of u^2, over all entries in groups as CoatAdamW makes them. Rounded are

  plain              both moments to E4M3, a scale for each group
  first_expanded     the first expanded to the range of E4M3 before, the second plain
  second_expanded    the other way round
  both_expanded      both: what CoatAdamW does
  plain_e5m2_second  the first to E4M3, the second to E5M2, both plain

Everywhere a second moment that is not zero stays at least the smallest code.
COAT (arXiv:2410.19313, table 1) has 20.1, 15.1, 18.1, 12.3 and 25.7 for these;
it does not say in which units, so compare order and ratios.

Bytes: all state tensors of the whole model, over its parameters.
Times: step() alone, on copies of the trained model with the same gradients, in
turns with torch's AdamW, fused (one pass in C++) and foreach (as CoatAdamW: torch
calls on many tensors).
"""
LABELS = {"dense": "dense", "tt": "tensor train"}
LEARNING_RATE = 1e-3
IDENTITY = ("form", "width", "rank", "steps")


def collect_moments(optimizers: Sequence[Optimizer]) -> list[Moments]:
    """The moments of AdamW in the groups that CoatAdamW would quantise; what it keeps in float32 is left out."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state and layout_of(parameter.shape).is_quantised:
                    found.append(_unbiased(optimizer.state[parameter], group["betas"]))
    return found


def step_error(moments: Sequence[Moments], first: str, second: str, eps: float = 1e-8) -> float:
    """The squared error of ``m / (sqrt(v) + eps)`` over its square, summed over all entries.

    Args:
        moments: As :func:`collect_moments` gives them.
        first: ``"e4m3"``, ``"expanded"`` (to the range of E4M3) or ``"e5m2"``: what ``m`` is rounded to.
        second: The same for ``v``; what is not zero does not become zero.
        eps: AdamW's.
    """
    wrong = whole = 0.0
    for m, v in moments:
        step = m / (v.sqrt() + eps)
        rounded = FORMATS[first](m, False) / (FORMATS[second](v, True).sqrt() + eps)
        wrong += (rounded - step).square().sum().item()
        whole += step.square().sum().item()
    return wrong / whole


def _unbiased(state: dict[str, Tensor], betas: tuple[float, float]) -> Moments:
    layout = layout_of(state["exp_avg"].shape)
    pairs = zip(("exp_avg", "exp_avg_sq"), betas, strict=True)
    m, v = (FlatGroups([layout]).gather([state[key]]) / (1 - beta ** state["step"]) for key, beta in pairs)
    return m[: layout.num_groups], v[: layout.num_groups]  # groups that only fill up loops follow


def _e4m3(groups: Tensor, keep_positive: bool) -> Tensor:
    return decode(*encode(groups, keep_positive=keep_positive, expand=False))


def _expanded(groups: Tensor, keep_positive: bool) -> Tensor:
    return decode(*encode(groups, keep_positive=keep_positive))


def _e5m2(groups: Tensor, keep_positive: bool) -> Tensor:
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(groups.dtype).tiny) / _E5M2_LARGEST
    scaled = groups / scale
    if keep_positive:
        scaled = scaled.clamp_min(_E5M2_SMALLEST) * groups.sign()
    return scaled.to(torch.float8_e5m2).float() * scale


FORMATS: dict[str, Callable[[Tensor, bool], Tensor]] = {"e4m3": _e4m3, "expanded": _expanded, "e5m2": _e5m2}
"""Groups, and whether zero is for zeros only, to what they are rounded to."""


def main() -> None:
    """Train and measure both forms, print the table, write the rows."""
    parser = benchmark_parser(DESCRIPTION, rounds=31)
    parser.add_argument("--steps", type=positive_integer, default=150, help="of the training; default 150")
    parser.add_argument("--width", type=positive_integer, default=256, help="hidden size of the model; default 256")
    parser.add_argument("--rank", type=positive_integer, default=30, help="largest rank of the trains; default 30")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    task = bytes_task()
    rows = []
    for form in LABELS:
        case = {"form": form, "width": args.width, "rank": args.rank if form == "tt" else "", "steps": args.steps}
        rows.append({**case, **measure(task, make_run(task, case), args.rounds)})
    here = machine()
    print_table(rows, f"Moments in FP8, after {args.steps} steps; {here['processor']}, threads: {here['threads']}")
    if not args.no_save:
        path = RESULTS / "bench_optimizer_states.csv"
        replace_rows(path, [{**row, **here} for row in rows], [*IDENTITY, *MACHINE_IDENTITY])
        Console(soft_wrap=True).print(f"Written to {path}")


def make_run(task: Task, case: dict[str, object]) -> Run:
    """The training whose moments are taken."""
    return Run(
        task=task.name,
        data=task.data,
        form=str(case["form"]),
        rank=str(case["rank"]),
        num_factors=3,
        update="adamw",
        lr=LEARNING_RATE,
        other_lr=LEARNING_RATE,
        width=int(str(case["width"])),
        steps=int(str(case["steps"])),
        budget=STEPS,
        seed=0,
    )


def measure(task: Task, run: Run, rounds: int) -> dict[str, object]:
    """All figures of one form."""
    trainer, batches = Trainer(task, run, steps=run.steps), task.batches(run.seed)
    for number in tqdm(range(run.steps), desc=f"training, {LABELS[run.form]}", unit="step", leave=False):
        loss = trainer.step(batches[number]).loss
    moments = collect_moments(trainer.optimizers)
    task.loss(trainer.model, batches[run.steps]).backward()
    optimizers = make_optimizers(trainer.model)
    timings = time_interleaved({name: each.step for name, each in optimizers.items()}, rounds, label="steps")
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return {
        "parameters": num_parameters,
        "loss": round(loss, 4),
        **{f"error_{name}": float(f"{step_error(moments, *kinds):.4g}") for name, kinds in ROUNDINGS.items()},
        **{
            f"{name}_bytes_per_parameter": round(state_bytes(optimizers[name]) / num_parameters, 4)
            for name in ("adamw_fused", "coat_adamw")
        },
        **{f"{name}_ms": round(timings.median(name) * 1e3, 3) for name in optimizers},
        **ratios(timings),
        "rounds": rounds,
    }


def make_optimizers(model: nn.Module) -> dict[str, Optimizer]:
    """Each with a copy of the parameters and their gradients, state already made."""
    makers = {
        "adamw_fused": partial(AdamW, fused=True),
        "adamw_foreach": partial(AdamW, foreach=True),
        "coat_adamw": CoatAdamW,
    }
    optimizers = {name: make(copied_parameters(model), lr=LEARNING_RATE) for name, make in makers.items()}
    for optimizer in optimizers.values():
        optimizer.step()
    return optimizers


def copied_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of their own with the same values and gradients."""
    copies = []
    for parameter in model.parameters():
        copied = nn.Parameter(parameter.detach().clone())
        copied.grad = copy.deepcopy(parameter.grad)
        copies.append(copied)
    return copies


def state_bytes(optimizer: Optimizer) -> int:
    """Of all tensors that it keeps."""
    return sum(value.nbytes for state in optimizer.state.values() for value in state.values())


def ratios(timings: Timings) -> dict[str, float]:
    """How many times longer CoatAdamW's step takes than those of torch."""
    others = [name for name in timings.seconds if name != "coat_adamw"]
    return {f"coat_over_{name}": round(timings.ratio(name, "coat_adamw"), 2) for name in others}


def print_table(rows: list[dict[str, object]], title: str) -> None:
    """A line for each figure, a column for each form."""
    table = Table(title=title, title_justify="left")
    table.add_column("figure")
    for row in rows:
        table.add_column(LABELS[str(row["form"])], justify="right")
    for name in rows[0]:
        if name != "form":
            values = [row[name] for row in rows]
            table.add_row(name.replace("_", " "), *(f"{v:,}" if isinstance(v, int) else str(v) for v in values))
    Console().print(table)


if __name__ == "__main__":
    main()
