"""benchmarks/memory/policy_table.py: the table of policies in docs/memory.md is what the csv file gives."""

import pytest

from benchmarks.memory import policy_table


def row(form="tensor train", policy="rank", dropout="0.0", date="2026-01-02", **figures):
    figures = {"saved_bytes": "174087428", "peak_bytes": "238092288", "step_s": "1.4824"} | figures
    return {"form": form, "policy": policy, "dropout": dropout, "date": date, **figures}


def test_a_policy_is_a_line_and_tensor_trains_come_first():
    rows = [row("dense", "keep"), row(), row(dropout="0.1", saved_bytes="183000000")]
    _, _, first, second = policy_table.policy_table(rows).splitlines()
    assert first == "| tensor train | `rank` | 174 MB | 238 MB | 1.48 s | 183 MB | 238 MB | 1.48 s |"
    assert second == "| dense | `keep` | 174 MB | 238 MB | 1.48 s |  |  |  |"


def test_the_newest_row_counts_and_policies_of_earlier_days_are_left_out():
    rows = [row(step_s="9"), row(step_s="1", date="2026-01-03"), row(policy="gone", date="2026-01-01")]
    lines = policy_table.policy_table(rows).splitlines()
    assert len(lines) == 3
    assert "1.00 s" in lines[2]


def test_the_setting_beside_a_policy_is_no_code():
    assert "| `rank`, attention again |" in policy_table.policy_table([row(policy="rank, attention again")])


def test_the_page_is_up_to_date():
    policy_table.main(["--check"])


def test_a_stale_page_is_named(tmp_path):
    page = tmp_path / "memory.md"
    page.write_text("<!-- activation policies table: begin -->\n<!-- activation policies table: end -->\n")
    with pytest.raises(SystemExit, match="policy_table"):
        policy_table.main(["--check", "--page", str(page)])
