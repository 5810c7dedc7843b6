"""scripts/loop/memory.py: glibc is told to keep or to hand back, other systems are left alone, and it says which."""

import subprocess
import sys
from pathlib import Path

from loop import memory

PROGRAM = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from loop import memory
print(memory.keep_freed_memory())
for _ in range(20):
    block = bytearray(50_000_000)
    del block
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = bytearray(50_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

HANDED_BACK = """
import re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from loop import memory
print(memory.hand_back_freed_memory())
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
blocks = [bytearray(1_000_000) for _ in range(50)]  # glibc keeps those under 32 MiB once one of them was freed
del blocks[0]
blocks += [bytearray(900_000) for _ in range(50)]
before = resident()
del blocks
print(before - resident())
"""


def test_a_block_that_was_freed_comes_back_without_page_faults():
    folder = str(Path(memory.__file__).parents[1])
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder], capture_output=True, text=True, check=True
    ).stdout.split()
    if printed[0] == "True":
        assert int(printed[1]) < 1_000  # fresh memory would take 12,207


def test_blocks_that_were_freed_are_no_longer_resident():
    folder = str(Path(memory.__file__).parents[1])
    command = [sys.executable, "-c", HANDED_BACK, folder]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    if printed[0] == "True":
        assert int(printed[1]) > 90_000  # of 95,000 kB


def test_other_systems(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.keep_freed_memory()
    assert not memory.hand_back_freed_memory()
    memory.trim_memory()
