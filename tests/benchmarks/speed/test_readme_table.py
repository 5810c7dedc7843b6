"""benchmarks/speed/readme_table.py: the README's tables of speed are what the csv files give, each of one machine."""

import pytest

from benchmarks.speed import readme_table
from loop.measure import MACHINE_IDENTITY, replace_rows

FIRST = "<!-- speed table: begin -->\n<!-- speed table: end -->\n"
SECOND = "<!-- speed table AMD: begin -->\n<!-- speed table AMD: end -->\n"
INTEL, AMD = {"processor": "Intel Xeon"}, {"processor": "AMD EPYC"}
STEP = "training step, six-encoder BERT, 32 x 128 tokens"


def step(date, **changes):
    return {
        "model": "bert-6x768", "optimizer": "tt_muon", "dtype": "fp32", "dropout": 0.1, "tokens": "32x128",
        "dense_s": 6.0, "tensor_train_s": 1.5, "ratio": 4.0, "dense_saved_bytes": 1850447492,
        "tensor_train_saved_bytes": 32768, "dense_peak_bytes": 1077649864, "tensor_train_peak_bytes": 36019128,
        "processor": "Intel Xeon", "cores": 2, "threads": 2, "environment": "",
        "torch": "2.13", "date": date, "command": "python -m benchmarks.speed.step --rounds 7",
    } | changes  # fmt: skip


def lookup(date, **changes):
    shared = {name: value for name, value in step(date).items() if name in (*MACHINE_IDENTITY, "torch", "date")}
    figures = {"dense_ms": 36.04, "tensor_train_ms": 300.7, "ratio": 0.96, "distinct_ids": 1833}
    return {
        "batch": "text",
        "ids": 4096,
        **figures,
        **shared,
        "command": "python -m benchmarks.speed.lookup",
        **changes,
    }


@pytest.fixture
def write(tmp_path):
    """Writes csv files of these rows and a README, runs the script, gives the tables by processor."""

    def run(readme=FIRST, *options, **files):
        for stem, rows in files.items():
            (tmp_path / f"{stem}.csv").unlink(missing_ok=True)
            columns = [*readme_table.COLUMNS[stem], *MACHINE_IDENTITY, "date", "gpu"]
            replace_rows(tmp_path / f"{stem}.csv", rows, columns)
        path = tmp_path / "README.md"
        path.write_text(f"above\n{readme}below\n", encoding="utf-8")
        readme_table.main(["--readme", str(path), "--results", str(tmp_path), *options])
        return tables(path.read_text(encoding="utf-8"))

    return run


def tables(text):
    """Sentence about the machine -> rows of cells, the headings left out."""
    found = {}
    for line in text.splitlines():
        if line.startswith("Measured"):
            rows = found[line] = []
        elif line.startswith("| ") and not line.startswith(("| what", "| ---")):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def test_readme_is_up_to_date():
    readme_table.main(["--check"])


def test_a_row_has_all_figures(write):
    kept = step("2026-01-02", environment="MALLOC_KEPT=1", ratio=4.26, dense_s=9)
    found = write(bench_step=[step("2026-01-01", torch="2.12"), kept], bench_lookup=[lookup("2026-01-01")])
    assert found == {
        "Measured on Intel Xeon, cores: 2, threads: 2, torch 2.12 and 2.13, 2026-01-01 to 2026-01-02.": [
            [f"{STEP}, dropout 0.1", "6.00 s", "1.50 s", "4.0", "4.3", "4.1 of 2", "1,850", "0.033", "1,078", "36",
             "`speed.step --rounds 7`"],
            ["embedding 30522 x 768 with optimizer, 1833 distinct ids", "36.0 ms", "301 ms", "0.96", "", "0.96 of 1",
             *[""] * 4, "`speed.lookup`"],
        ]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "sentence", "cases"),
    [
        ([step("2026-01-02", **AMD), step("2026-01-01", dropout=0.0)], "AMD EPYC, cores: 2", 1),
        ([step("2026-01-01", **AMD), step("2026-01-01")], "Intel Xeon, cores: 2", 1),
        ([step("2026-01-01", cores=4), step("2026-01-02", dropout=0.0)], "cores: 2", 1),
        ([step("2026-01-01"), step("2026-01-01", dropout=0.0), step("2026-01-02", threads=1)], "threads: 2", 2),
        ([step("2026-01-01"), step("2026-01-02", threads=1)], "threads: 1", 1),
        ([step("2026-01-01"), step("2026-01-02", environment="OMP_WAIT_POLICY=passive")], "`OMP_WAIT_POLICY=", 1),
    ],
    ids=["newest", "same day", "cores", "most cases", "equally many cases", "environment"],
)
def test_a_table_never_mixes_machines(write, rows, sentence, cases):
    (found,) = write(bench_step=rows).items()
    assert sentence in found[0]
    assert len(found[1]) == cases


def test_of_several_rows_the_newest_is_taken(write):
    older = step("2026-01-01", optimizer="adamw", ratio=1.5)
    (rows,) = write(bench_step=[step("2026-01-02", optimizer="adamw", ratio=2.5), older]).values()
    assert [(row[0], row[3]) for row in rows] == [(f"{STEP}, dropout 0.1, AdamW", "2.5")]


def test_a_row_with_kept_memory_alone_is_no_ordinary_ratio(write):
    (rows,) = write(bench_step=[step("2026-01-01", environment="MALLOC_KEPT=1")]).values()
    assert rows[0][3:5] == ["", "4.0"]


def test_the_median_is_that_of_all_machines_with_memory_kept_or_not(write):
    kept = step("2026-01-02", environment="MALLOC_KEPT=1", ratio=5.5)
    others = [step("2026-01-01", ratio=4.5, **AMD), step("2026-01-01", ratio=9, dropout=0.0, **AMD)]
    others += [step("2026-01-01", ratio=20, gpu="NVIDIA H200"), step("2026-01-01", ratio=30, threads=1)]
    (rows,) = [
        table for name, table in write(bench_step=[step("2026-01-02"), kept, *others]).items() if "H200" not in name
    ]
    assert [(row[0], row[5]) for row in rows] == [(f"{STEP}, dropout 0.1", "4.5 of 3")]


def test_commands_have_no_folders(write):
    command = "python -m benchmarks.speed.step --file=/home/someone/rows.csv '/mnt/a b'"
    (rows,) = write(bench_step=[step("2026-01-01", command=command)]).values()
    assert rows[0][-1] == "`speed.step --file=rows.csv 'a b'`"


def test_second_table_has_what_the_first_has_not(write, tmp_path):
    rows = [step("2026-01-01", **AMD), step("2026-01-01", dropout=0.0, **AMD), step("2026-01-02")]
    first, second = write(FIRST + SECOND, bench_step=rows).values()
    assert [row[0] for row in first] == [f"{STEP}, dropout 0.1"]
    assert [row[0] for row in second] == [f"{STEP}, no dropout"]
    (only,) = write(FIRST + SECOND, "--processor", "AMD", bench_step=rows).items()
    assert "AMD" in only[0]
    assert only[1] == second
    assert len(write(FIRST + SECOND, bench_step=[rows[0], rows[2]])) == 1
    assert "All of its cases are in the table above." in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_gpu_has_a_table_of_its_own(write, tmp_path):
    write(bench_step=[step("2026-01-01")])
    assert "On a GPU: not measured." in (tmp_path / "README.md").read_text(encoding="utf-8")
    cpu, gpu = write(bench_step=[step("2026-01-01"), step("2026-01-02", gpu="NVIDIA H200", ratio=9)])
    assert "H200" not in cpu
    assert gpu.startswith("Measured on NVIDIA H200 beside Intel Xeon")
    assert "not measured" not in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_missing_files_are_not_measured(write, tmp_path):
    assert write() == {}
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "\nNot measured.\n" in text
    assert text.startswith("above\n<!--")
    assert text.endswith("-->\nbelow\n")


def test_cases_without_a_name_are_told(write, capsys):
    assert write(bench_step=[step("2026-01-01", tokens="1x1")]) == {}
    assert "'1x1'" in capsys.readouterr().err


def test_check_says_what_to_run_and_writes_nothing(write, tmp_path):
    rows = [step("2026-01-01")]
    with pytest.raises(SystemExit, match=r"Run: python -m benchmarks\.speed\.readme_table$"):
        write(FIRST, "--check", bench_step=rows)
    readme = tmp_path / "README.md"
    assert readme.read_text(encoding="utf-8") == f"above\n{FIRST}below\n"
    write(bench_step=rows)
    readme_table.main(["--check", "--readme", str(readme), "--results", str(tmp_path)])


@pytest.mark.parametrize(
    ("readme", "options", "message"),
    [
        ("", [], "Put in these two lines"),
        (FIRST, ["--processor", "AMD"], "<!-- speed table AMD: begin -->"),
        (FIRST + SECOND.replace("AMD: end", "amd: end"), [], "no partner"),
        (FIRST + SECOND.replace("AMD", "ARM"), [], "there are rows of ['Intel Xeon']"),
    ],
)
def test_markers_that_cannot_be_filled_are_refused(write, capsys, readme, options, message):
    with pytest.raises(SystemExit):
        write(readme, *options, bench_step=[step("2026-01-01")])
    assert message in capsys.readouterr().err
