"""What compute-sanitizer printed in steps of gpu_report.py: how much of it is about our kernels."""

import re
from pathlib import Path
from typing import Any

__all__ = ["kernel_names", "read_findings"]

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
PREFIX = "========="
NOT_FINDINGS = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY", "Warning", "Target")
MOST_EXAMPLES = 5


def kernel_names() -> list[str]:
    """Names of the functions that run on a GPU, from the sources."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.cu")))
    return sorted(set(re.findall(r"\bKERNEL\s+(?:LAUNCH_BOUNDS\([^)]*\)\s*)?(\w+)\(", text)))


def read_findings(log: str, tool: str) -> dict[str, Any]:
    """A row: how many findings name a kernel of ours, how many only others, and the first of ours in words.

    What the libraries of torch do is not ours to mend: initcheck finds reads of fresh memory in many of them.
    """
    ours, others = [], 0
    name = re.compile(rf"(?<!native::)\b(?:{'|'.join(kernel_names())})\b")
    for block in _blocks(log):
        if name.search(block):
            ours.append(" ".join(block.split())[:300])
        else:
            others += 1
    return {"tool": tool, "ours": len(ours), "others": others, "examples": ours[:MOST_EXAMPLES]}


def _blocks(log: str) -> list[str]:
    """Findings: a line that begins at the margin of the tool, and those below it that are indented."""
    blocks: list[list[str]] = []
    for line in log.splitlines():
        if not line.startswith(PREFIX):
            continue
        text = line.removeprefix(PREFIX)
        if text.startswith("     ") and blocks:
            blocks[-1].append(text)
        elif text.strip():
            blocks.append([text.strip()])
    return ["\n".join(block) for block in blocks if not block[0].startswith(NOT_FINDINGS)]
