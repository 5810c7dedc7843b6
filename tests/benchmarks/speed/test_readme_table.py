"""benchmarks/speed/readme_table.py: figures of speed in README and docs are those of the csv files, of one machine."""

import pytest

from benchmarks.speed import readme_table
from loop.measure import MACHINE_IDENTITY, replace_rows

TABLE, SUMMARY, HEADLINE = (
    f"<!-- speed {kind}: begin -->\n<!-- speed {kind}: end -->\n" for kind in ("table", "summary", "headline")
)
INTEL, AMD = {"processor": "Intel Xeon"}, {"processor": "AMD EPYC"}
STEP = "training step, six-encoder BERT, 32 x 128 tokens"


def step(date, **changes):
    return {
        "model": "bert-6x768", "optimizer": "tt_muon", "dtype": "fp32", "dropout": 0.1, "tokens": "32x128",
        "dense_s": 6.0, "tensor_train_s": 1.5, "ratio": 4.0, "dense_saved_bytes": 1850447492,
        "tensor_train_saved_bytes": 32768, "dense_peak_bytes": 1077649864, "tensor_train_peak_bytes": 36019128,
        "dense_parameters": 66_000_000, "tensor_train_parameters": 1_500_000,
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


def inference(date, **changes):
    shared = {name: value for name, value in step(date).items() if name in (*MACHINE_IDENTITY, "torch", "date")}
    figures = {"dense_ms": 610, "tensor_train_ms": 98, "ratio": 6.2, "dense_bytes": 267829260}
    figures |= {"tensor_train_bytes": 5943180, "model": "bert-6x768", "tokens": "8x128", "dtype": "fp32"}
    return {**figures, **shared, "command": "python -m benchmarks.speed.inference", **changes}


@pytest.fixture
def write(tmp_path):
    """Writes csv files of these rows and a page, runs the script, gives the tables by processor."""

    def run(page=TABLE, *options, **files):
        for stem, rows in files.items():
            (tmp_path / f"{stem}.csv").unlink(missing_ok=True)
            columns = [*readme_table.COLUMNS[stem], *MACHINE_IDENTITY, "date", "gpu"]
            replace_rows(tmp_path / f"{stem}.csv", rows, columns)
        path = tmp_path / "page.md"
        path.write_text(f"above\n{page}below\n", encoding="utf-8")
        readme_table.main(["--pages", str(path), "--results", str(tmp_path), *options])
        return tables(path.read_text(encoding="utf-8"))

    return run


def tables(text):
    """Sentence about the machine -> rows of cells, the headings left out."""
    found, rows = {}, []
    for line in text.splitlines():
        if line.startswith("Measured"):
            rows = found[line] = []
        elif line.startswith("| ") and not line.startswith(("| what", "| ---")):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def test_pages_are_up_to_date():
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


def test_gpu_has_a_table_of_its_own(write, tmp_path):
    write(bench_step=[step("2026-01-01")])
    assert "On a GPU: not measured." in (tmp_path / "page.md").read_text(encoding="utf-8")
    cpu, gpu = write(bench_step=[step("2026-01-01"), step("2026-01-02", gpu="NVIDIA H200", ratio=9)])
    assert "H200" not in cpu
    assert gpu.startswith("Measured on NVIDIA H200 beside Intel Xeon")
    assert "not measured" not in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_missing_files_are_not_measured(write, tmp_path):
    assert write() == {}
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "\nNot measured.\n" in text
    assert text.startswith("above\n<!--")
    assert text.endswith("-->\nbelow\n")


def test_cases_without_a_name_are_told(write, capsys):
    assert write(bench_step=[step("2026-01-01", tokens="1x1")]) == {}
    assert "'1x1'" in capsys.readouterr().err


def test_check_says_what_to_run_and_writes_nothing(write, tmp_path):
    rows = [step("2026-01-01")]
    with pytest.raises(SystemExit, match=r"page\.md\. Run: python -m benchmarks\.speed\.readme_table$"):
        write(TABLE, "--check", bench_step=rows)
    page = tmp_path / "page.md"
    assert page.read_text(encoding="utf-8") == f"above\n{TABLE}below\n"
    write(bench_step=rows)
    readme_table.main(["--check", "--pages", str(page), "--results", str(tmp_path)])


def text_between(tmp_path):
    """What stands between the comments of the page, without empty lines."""
    lines = (tmp_path / "page.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines[2:-2] if line]


def test_the_sentence_has_parameters_speed_and_memory_of_one_step(write, tmp_path):
    rows = [step("2026-01-02", dropout=0.0, ratio=5), step("2026-01-01", dropout=0.0, ratio=4, **AMD)]
    write(HEADLINE, bench_step=[*rows, step("2026-01-03", ratio=9)])
    sentence = " ".join(text_between(tmp_path))
    assert "**44 times fewer parameters**" in sentence
    assert "**4.5 times as fast**" in sentence  # the median of both machines
    assert "**29.9 times less memory**" in sentence


def test_the_summary_has_times_memory_and_weights(write, tmp_path):
    plain = step("2026-01-01", dropout=0.0, ratio=5.0)
    kept = step("2026-01-01", dropout=0.0, ratio=4.0, dense_s=5, environment="MALLOC_KEPT=1")
    write(SUMMARY, bench_step=[plain, kept], bench_inference=[inference("2026-01-01")])
    *lines, note = text_between(tmp_path)
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    assert cells == [
        [f"{STEP}, no dropout", "6.00 s", "1.50 s", "4.5"],
        ["peak memory of that step", "1,078 MB", "36 MB", "29.9"],
        ["inference, six-encoder BERT, 8 x 128 tokens", "610 ms", "98.0 ms", "6.2"],
        ["weights of the six-encoder BERT, float32", "268 MB", "5.9 MB", "45.1"],
    ]
    assert note.startswith("Measured on Intel Xeon")
    assert "medians of 1 to 2 runs" in note


def test_the_summary_of_nothing_says_so(write, tmp_path):
    write(SUMMARY)
    assert text_between(tmp_path) == ["Not measured."]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("", "Put in, say"),
        (TABLE.replace(": end", ": stop"), "no partner"),
        (TABLE.replace("table", "fable"), "found comments for ['fable']"),
        (HEADLINE, "benchmarks.speed.step --dropout 0"),
    ],
)
def test_pages_that_cannot_be_filled_are_refused(write, capsys, page, message):
    with pytest.raises(SystemExit):
        write(page, bench_step=[step("2026-01-01")])
    assert message in capsys.readouterr().err
