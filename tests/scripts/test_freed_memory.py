"""scripts/freed_memory.py: glibc is told, other systems are left alone, and it says which."""

import subprocess
import sys
from pathlib import Path

import freed_memory

PROGRAM = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import freed_memory
print(freed_memory.keep_freed_memory())
for _ in range(20):
    block = bytearray(50_000_000)
    del block
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = bytearray(50_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_block_that_was_freed_comes_back_without_page_faults():
    folder = str(Path(freed_memory.__file__).parent)
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder], capture_output=True, text=True, check=True
    ).stdout.split()
    if printed[0] == "True":
        assert int(printed[1]) < 1_000  # fresh memory would take 12,207


def test_other_systems(monkeypatch):
    monkeypatch.setattr(freed_memory.sys, "platform", "darwin")
    assert not freed_memory.keep_freed_memory()
