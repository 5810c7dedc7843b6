"""benchmarks/gpu/verdicts.py, page.py, report.py, adopt.py and plan.py: from rows to a page."""

import csv

import pytest

from benchmarks.gpu import adopt, plan
from benchmarks.gpu.devices import unmet_needs
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.page import PAGE, REHEARSED, write_results
from benchmarks.gpu.report import kernel_names, read_findings
from benchmarks.gpu.verdicts import EQUAL, LOST, ON, OPEN, RULES, SOMETIMES, WRONG, judge
from benchmarks.speed import step as speed_step

FINDINGS = """
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at void <unnamed>::linear_kernel<(int)0, (int)32, (bool)1>(<unnamed>::Linear)+0x4b0
=========     by thread (32,0,0) in block (0,0,0)
=========
some words of the program
========= Error: Race reported between Write access at void <unnamed>::sum_kernel(<unnamed>::Backward)+0x1
=========     and Read access at void <unnamed>::sum_kernel(<unnamed>::Backward)+0x2 [96 hazards]
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4>+0x10
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::sum_kernel<float>+0x10
========= ERROR SUMMARY: 4 errors
"""


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    devices = [{"name": "Some GPU", "capability": [9, 0], "gigabytes": 80}]
    journal.add("report", rehearsal=False, devices=devices, versions={"torch": "2.11"})
    return journal


def kernel_row(ratio, op="forward", **others):
    return {
        "op": op,
        "format": "bf16",
        "tokens": 40,
        "in": 64,
        "out": 96,
        "rank": 16,
        "ratio_to_torch": ratio,
        **others,
    }


def read(path):
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def verdict_of(journal, subject):
    return next(found.verdict for found in judge(journal) if found.subject == subject)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([], OPEN),
        ([1.4, 1.05], ON),
        ([1.4, 0.96], ON),
        ([1.4, 1.3, 0.9], SOMETIMES),
        ([1.3, 0.8, 0.8], SOMETIMES),
        ([1.04, 0.97], EQUAL),
        ([0.9, 0.9, 1.01], LOST),
    ],
)
def test_verdicts(journal, ratios, verdict):
    for number, ratio in enumerate(ratios):
        journal.add("row", "kernels-bf16", case=str(number), row=kernel_row(ratio))
    assert verdict_of(journal, "kernel: low-rank linear") == verdict


@pytest.mark.parametrize("outcome", ["failed", "died"])
def test_what_is_wrong_is_not_switched_on(journal, outcome):
    journal.add("row", "kernels-bf16", case="1", row=kernel_row(3.0))
    journal.add("end", "tests-kernels", case="tests/kernels/test_low_rank_linear.py::test_a", outcome=outcome, note="")
    assert verdict_of(journal, "kernel: low-rank linear") == WRONG
    assert verdict_of(journal, "kernel: halves") == OPEN


def test_findings_of_the_sanitizer_hold_back_every_kernel(journal):
    row = read_findings(FINDINGS, "memcheck")
    assert (row["ours"], row["others"]) == (2, 2)
    assert "linear_kernel" in row["examples"][0]
    journal.add("row", "kernels-bf16", case="1", row=kernel_row(3.0))
    journal.add("row", "sanitizer-memcheck", case="findings", row=row)
    assert verdict_of(journal, "kernel: low-rank linear") == WRONG
    assert "found 2 faults" in next(found.why for found in judge(journal) if found.verdict == WRONG)


def test_treatments_are_compared_within_a_step(journal):
    times = {"eager": (20, 10), "graphs": (10, 2), "graphs and kernels": (10, 1), "compiled": (5, 9)}
    for treatment, (dense, ours) in times.items():
        row = {"treatment": treatment, "dense_step_ms": dense, "tensor_train_step_ms": ours, "ratio": dense / ours}
        journal.add("row", "step-32x128", case=treatment, row=row)
    found = {verdict.subject: verdict for verdict in judge(journal)}
    assert found["CUDA graphs (GraphedStep), tensor train"].why.startswith("5.00 times")
    assert found["kernels in CUDA graphs"].why.startswith("2.00 times")
    assert found["tensor train at its best against dense at its best"].why.startswith("5.00 times")
    assert found["torch.compile, tensor train"].verdict == ON
    assert found["kernels in plain steps"].verdict == OPEN


def test_files_of_a_gpu_are_like_those_of_the_scripts(journal, tmp_path):
    journal.add("row", "kernels-bf16", case="1", row=kernel_row(3.0, gpu="Some GPU"))
    journal.add("row", "step-32x128", case="eager", row={"treatment": "eager", "model": "m", "dense_step_ms": 1.0,
                                                         "tensor_train_step_ms": 1.0, "ratio": 1.0})  # fmt: skip
    names = write_results(journal, tmp_path)
    rows = {name: read(tmp_path / name) for name in names if name.endswith(".csv")}
    assert rows["bench_kernels.csv"][0]["gpu"] == "Some GPU"
    assert "step" not in rows["bench_kernels.csv"][0]
    assert set(rows["bench_step.csv"][0]) == {"model", "ratio"}
    assert len(rows["report.csv"]) == 2
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "REHEARSAL" not in page
    assert "| kernel: low-rank linear | switch on by default |" in page


def test_a_rehearsal_says_so_and_has_no_rows_for_the_scripts(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.add("report", rehearsal=True, devices=plan.REHEARSED_DEVICES, versions={})
    journal.add("row", "kernels-bf16", case="1", row=kernel_row(3.0))
    assert write_results(journal, tmp_path) == ["report.md", "report.csv"]
    assert (tmp_path / PAGE).read_text(encoding="utf-8").splitlines()[2] == REHEARSED
    assert read(tmp_path / "report.csv")[0]["rehearsal"] == "REHEARSAL"
    assert not (tmp_path / "bench_kernels.csv").exists()


def test_rows_are_taken_into_the_results_once(journal, tmp_path):
    folder, results = tmp_path, tmp_path / "results"
    for _ in range(2):
        journal.add("row", "kernels-bf16", case="1", row=kernel_row(3.0, gpu="Some GPU"))
        write_results(journal, folder)
        adopt.main([str(folder), "--results", str(results)])
    assert len(read(results / "bench_kernels.csv")) == 1
    assert not (results / "bench_step.csv").exists()


@pytest.mark.parametrize("rehearsal", [True, None])
def test_nothing_of_a_rehearsal_gets_into_the_results(rehearsal, tmp_path, capsys):
    if rehearsal:
        Journal(tmp_path / "journal.jsonl").add("report", rehearsal=True, devices=[], versions={})
    with pytest.raises(SystemExit):
        adopt.main([str(tmp_path), "--results", str(tmp_path / "results")])
    assert ("a rehearsal" if rehearsal else "holds no report") in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_plan_fits_its_time():
    assert sum(step.seconds for step in plan.STEPS) <= 40 * 60
    assert all(step.seconds <= 8 * 60 and step.case_seconds <= 8 * 60 for step in plan.STEPS)
    names = [step.name for step in plan.STEPS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("rehearsal", [True, False])
def test_the_plan_names_models_that_there_are(rehearsal):
    models = [step.settings_for(rehearsal)["model"] for step in plan.STEPS if "model" in step.settings]
    for model in models:
        speed_step.random_ids(model, 1, 4)


@pytest.mark.parametrize(
    ("capability", "skipped"),
    [([9, 0], set()), ([8, 0], {"fp8"}), ([7, 5], {"fp8", "kernels", "tests"})],
)
def test_a_device_that_is_too_old_is_told(capability, skipped):
    header = {"rehearsal": True, "devices": [{"name": "Old GPU", "capability": capability}]}
    reasons = [(step.kind, unmet_needs(step, header, "")) for step in plan.STEPS]
    assert {kind for kind, reason in reasons if reason} == skipped
    assert all("Old GPU has" in reason for _, reason in reasons if reason)


def test_our_kernels_are_known_by_name():
    names = kernel_names()
    assert {"linear_kernel", "halves_kernel", "coat_adamw_kernel", "tiled_mlp_kernel"} <= set(names)


def test_every_rule_has_a_name_of_its_own():
    assert len({rule.subject for rule in RULES}) == len(RULES)
