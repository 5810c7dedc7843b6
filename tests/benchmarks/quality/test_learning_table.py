"""benchmarks/quality/learning_table.py: the tables of learning in docs are what the csv files give."""

import csv

import pytest

from benchmarks.quality import learning_table
from benchmarks.quality.results import CURVES, ROWS

BEST = "<!-- best rates table: begin -->\n<!-- best rates table: end -->\n"
EQUAL = "<!-- equal seconds table: begin -->\n<!-- equal seconds table: end -->\n"
FIRST, SECOND, THIRD = (task.heading for task in learning_table.TASKS)


def row(rank="32", update="muon", lr=0.001, seed=0, loss=2.0, **changes):
    values = {
        "run": f"{rank}-{update}-{lr}-{seed}", "task": "bytes", "form": "tt" if rank else "dense", "rank": rank,
        "num_factors": "3" if rank else "", "update": update, "lr": lr, "width": 256,
        "steps": 250, "budget": "steps", "seed": seed, "status": "complete", "steps_done": 250,
        "held_out_loss": loss, "accuracy": "", "step_seconds": 0.2, "date": "2026-01-02",
    }  # fmt: skip
    return {name: str(value) for name, value in (values | changes).items()}


def points(run, losses):
    return [
        {"run": run, "point": str(step), "step": str(step), "held_out_loss": str(loss)}
        for step, loss in losses.items()
    ]


@pytest.fixture
def write(tmp_path):
    """Writes csv files and a page, runs the script, gives the lines of its tables by their first cells."""

    def run(page, rows, curves=(), *options):
        for name, lines in ((ROWS, rows), (CURVES, curves)):
            with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, lines[0] if lines else ["run"])
                writer.writeheader()
                writer.writerows(lines)
        path = tmp_path / "page.md"
        path.write_text(f"above\n{page}below\n", encoding="utf-8")
        learning_table.main(["--pages", str(path), "--results", str(tmp_path), *options])
        return read(path.read_text(encoding="utf-8"))

    return run


def read(text):
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]


def test_pages_are_up_to_date():
    learning_table.main(["--check"])


def best(write, rows, task=FIRST):
    return {line["model and update"]: line[task] for line in write(BEST, rows) if line[task]}


def test_the_best_rate_is_that_of_the_lowest_mean(write):
    rows = [row(lr=0.002, seed=seed, loss=loss) for seed, loss in enumerate((1.7, 2.1))]
    rows += [row(lr=0.001, loss=1.95), row(lr=0.0028, loss=3)]
    assert best(write, rows) == {"rank 32, `TTMuon`": "1.900 (2e-3, 2 seeds)"}


def test_a_rate_without_others_is_told(write):
    assert best(write, [row("", lr=0.00025)]) == {"dense, Muon": "2.000 (2.5e-4 alone, 1 seed)"}


def test_the_third_task_has_accuracies_at_the_rate_of_the_lowest_loss(write):
    pairs = {"task": "nli", "steps": 3385}
    rows = [row(loss=0.9, accuracy=0.551, **pairs), row(lr=0.002, loss=1.1, accuracy=0.6, **pairs)]
    assert best(write, rows, THIRD) == {"rank 32, `TTMuon`": "55.1 % (1e-3, 1 seed)"}


def test_of_one_rate_and_seed_the_newest_row_counts_on_any_machine(write):
    rows = [row(loss=1.5, date="2026-01-03", processor="a"), row(loss=2.5, processor="b")]
    assert best(write, rows) == {"rank 32, `TTMuon`": "1.500 (1e-3 alone, 1 seed)"}


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 512}, {"steps": 2000}, {"budget": "seconds of dense"}, {"num_factors": 1}, {"rank": "8"},
        {"status": "diverged", "held_out_loss": ""},
    ],
    ids=str,
)  # fmt: skip
def test_other_runs_are_left_out(write, changes):
    assert best(write, [row(**changes)]) == {}


def test_dense_muon_has_the_steps_of_as_many_seconds(write):
    # 250 steps at 0.1 s, the least of both rates, are 50 of dense Muon at 0.5 s: half way between 1.8 and 1.6.
    trains = [row(lr=0.002, loss=1.75, step_seconds=0.3), row(loss=2, step_seconds=0.1)]
    dense = [row("", step_seconds=0.5)]
    curves = points(dense[0]["run"], {40: 1.8, 45: "", 60: 1.6, 250: 1})
    (line,) = write(EQUAL, [*trains, *dense], curves)
    assert list(line.values())[1:4] == ["rank 32, `TTMuon`", "250", "25"]
    assert line["held-out loss"] == "1.750 (2e-3, 1 seed)"
    assert line["dense Muon, steps in as many seconds"] == "50"
    assert line["held-out loss then"] == "1.700 (1e-3 alone, 1 seed)"


@pytest.mark.parametrize("step", [9, 21])
def test_losses_are_not_made_up_beyond_the_curve(step):
    with pytest.raises(ValueError, match="from step 10 to 20"):
        learning_table.loss_after(points("run", {10: 2, 20: 1}), step)


def test_check_names_the_page_and_writes_nothing(write, tmp_path):
    with pytest.raises(SystemExit, match=r"page\.md.*Run: python -m benchmarks\.quality\.learning_table"):
        write(BEST, [row()], (), "--check")
    page = tmp_path / "page.md"
    assert page.read_text(encoding="utf-8") == f"above\n{BEST}below\n"
    write(BEST, [row()])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("above\n<!--")
    assert text.endswith("-->\nbelow\n")
    learning_table.main(["--check", "--pages", str(page), "--results", str(tmp_path)])


@pytest.mark.parametrize(
    ("page", "message"),
    [("", "Put in <!-- best rates table: begin -->"), (BEST.replace("end", "stop"), "has no <!-- best rates")],
)
def test_pages_without_a_place_are_refused(write, capsys, page, message):
    with pytest.raises(SystemExit):
        write(page, [row()])
    assert message in capsys.readouterr().err
