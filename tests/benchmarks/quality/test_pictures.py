"""benchmarks/quality/pictures.py: four pictures from the csv files, or a clear word why not."""

import sys

import pytest

from benchmarks.quality import pictures
from benchmarks.quality.pictures import main, mean_curve
from benchmarks.quality.results import IDENTITY, Results

PICTURES = ["quality_bytes.png", "quality_rates.png", "quality_seconds.png", "quality_steps.png"]


@pytest.fixture
def results_dir(tmp_path):
    results = Results(tmp_path / "results")
    for task, form, lr, seed, loss in (
        ("bytes", "dense", 0.001, 0, 2.0),
        ("bytes", "dense", 0.001, 1, 2.2),
        ("bytes", "tt", 0.001, 0, 2.1),
        ("bytes", "tt", 0.01, 0, None),
        ("nli", "tt", 0.01, 0, 1.1),
    ):
        run = f"{task}-{form}-{lr}-{seed}"
        row = dict.fromkeys(IDENTITY, "") | {
            "task": task, "form": form, "lr": lr, "seed": seed, "run": run, "training_bytes": 1000, "budget": "steps",
            "held_out_loss": loss or "", "status": "complete" if loss else "diverged",
        }  # fmt: skip
        points = [
            {"point": point, "step": point * 5, "seconds": point * (seed + 1), "training_loss": 3}
            | {"held_out_loss": loss + 1 / point if loss and point % 2 == 0 else ""}
            for point in range(1, 5)
        ]
        results.save(row, points)
    return results.folder


def test_pictures_are_drawn(results_dir, tmp_path, capsys):
    assert main(["--results_dir", str(results_dir), "--folder", str(tmp_path / "pictures")]) == 0
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == PICTURES
    assert capsys.readouterr().out.count("Drawn: ") == 4


def test_curves_are_means_over_the_seeds(results_dir):
    results = Results(results_dir)
    rows = [row for row in results.rows("bytes") if row["form"] == "dense"]
    assert mean_curve(rows, results.curves(), "step") == [(10, pytest.approx(2.6)), (20, pytest.approx(2.35))]
    assert mean_curve(rows, results.curves(), "seconds") == [(3, pytest.approx(2.6)), (6, pytest.approx(2.35))]


def test_only_some_rows(results_dir, tmp_path):
    folder = ["--results_dir", str(results_dir), "--folder", str(tmp_path / "pictures")]
    assert main([*folder, "--only", "form=dense", "seed=1,7"]) == 0
    with pytest.raises(ValueError, match=r"has no row with form=none\. Run python -m benchmarks\.quality\.run first"):
        main([*folder, "--only", "form=none"])
    with pytest.raises(ValueError, match=r"--only shape=2: no such column"):
        main([*folder, "--only", "shape=2"])


def test_without_matplotlib(results_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--results_dir", str(results_dir), "--folder", str(tmp_path / "pictures")]) == 1
    assert 'pip install "hf_comera[plots]"' in capsys.readouterr().out
    assert not (tmp_path / "pictures").exists()


def test_pictures_of_the_docs_are_the_default():
    assert pictures.PICTURES.parts[-2:] == ("docs", "pictures")
