"""scripts/loop/memory.py: what was in use for a moment is seen, each time, and what was there before is not."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loop import memory

PROGRAM = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from loop.memory import hand_back_freed_memory, peak_growth
hand_back_freed_memory()
there = torch.ones(20_000_000)
for size in (10_000_000, 2_000_000, 10_000_000):
    growth = peak_growth(lambda: torch.ones(size), torch.device("cpu"))
    print(growth.num_bytes / (4 * size), growth.measured_by)
"""


@pytest.mark.skipif(not memory.STATUS.exists(), reason="needs the status file of a Linux process")
def test_each_peak_is_seen():
    folder = str(Path(memory.__file__).parents[1])
    command = [sys.executable, "-c", PROGRAM, folder]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        share, measured_by = line.split(maxsplit=1)
        if measured_by == "VmHWM":  # elsewhere the peak cannot be reset
            assert 0.95 < float(share) < 1.15


def test_says_where_the_peak_cannot_be_reset(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("VmPeak:\t  900 kB\nVmHWM:\t  700 kB\nVmRSS:\t  200 kB\n", encoding="utf-8")
    monkeypatch.setattr(memory, "STATUS", status)
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "no folder" / "clear_refs")
    growth = memory.peak_growth(lambda: None, torch.device("cpu"))
    assert growth == (500 * 1024, "VmHWM of the process")


def test_no_peak_where_the_system_does_not_say(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "missing")
    calls = []
    assert memory.peak_growth(lambda: calls.append(1), torch.device("cpu")) == (None, "")
    assert calls == [1]
