"""benchmarks/speed/picture.py: the README's picture is of the row that its sentence tells of."""

import csv

import pytest

from benchmarks.harness.timing import RESULTS
from benchmarks.speed import picture as speed_picture


def test_the_picture_is_up_to_date():
    speed_picture.main(["--check"])


def test_another_row_is_another_picture(tmp_path):
    with (RESULTS / "bench_step.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    picture, options = tmp_path / "speed.png", ["--picture", str(tmp_path / "speed.png"), "--results", str(tmp_path)]

    def write(seconds):
        with (tmp_path / "bench_step.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(row | {"tensor_train_s": seconds} for row in rows)

    write("1.25")
    with pytest.raises(SystemExit, match=r"Run: python -m benchmarks\.speed\.picture"):
        speed_picture.main([*options, "--check"])
    speed_picture.main(options)
    assert "1.2 s" in speed_picture.told(picture)
    speed_picture.main([*options, "--check"])
    write("2.5")
    with pytest.raises(SystemExit, match=r"Run: python -m benchmarks\.speed\.picture"):
        speed_picture.main([*options, "--check"])
