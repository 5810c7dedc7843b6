"""What the GPU report finds on a machine: GPUs, versions, packages that are missing, and needs that are not met."""

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from typing import Any

from benchmarks.gpu.plan import FP8, KERNELS, REHEARSED_DEVICES, SANITIZER, Step

__all__ = ["describe_devices", "missing_packages", "unmet_needs"]

USEFUL = {
    "pytest": "tests run one after the other, by a plain loop that leaves out what it cannot",
    "pytest_timeout": "a test that hangs is ended with its process, as any case",
    "triton": "nothing is compiled for a GPU",
}
"""Packages that the report can do without, and what that costs."""
VERSIONS = ("torch", "transformers", "accelerate", "peft", "triton", "pytest", "numpy")
CAPABILITIES = {KERNELS: (8, 0), FP8: (8, 9)}


PROGRAM = """
import json, torch
found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
devices = [
    {"name": each.name, "capability": [each.major, each.minor], "gigabytes": round(each.total_memory / 1e9, 1)}
    for each in found
]
print(json.dumps({"devices": devices, "cuda": torch.version.cuda}))
"""
"""Asks torch in a process of its own, so that the one that watches the others never holds a device."""


def describe_devices(rehearsal: bool, devices: list[dict[str, Any]] | None) -> dict[str, Any]:
    """GPUs as torch sees them, or those that a rehearsal is told to believe in; and the versions of packages.

    Raises:
        RuntimeError: If torch cannot be asked.
    """
    if rehearsal:
        found = {"devices": REHEARSED_DEVICES if devices is None else devices, "cuda": "none"}
    else:
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"torch cannot be asked for GPUs by {sys.executable}: {done.stderr.strip()[-500:]}")
        found = json.loads(done.stdout.splitlines()[-1])
    versions = {"python": platform.python_version(), "cuda": found["cuda"]} | {
        each: _version(each) for each in VERSIONS
    }
    return {"rehearsal": rehearsal, "devices": found["devices"], "versions": versions}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def missing_packages() -> dict[str, str]:
    """What is not installed, and what that costs."""
    return {name: cost for name, cost in USEFUL.items() if importlib.util.find_spec(name) is None}


def unmet_needs(step: Step, header: dict[str, Any], sanitizer: str) -> str:
    """Why a step cannot be had here; empty if it can. Only the first device counts."""
    device = header["devices"][0]
    for need in step.needs:
        if need in CAPABILITIES and tuple(device["capability"]) < CAPABILITIES[need]:
            return f"{device['name']} has {'.'.join(map(str, device['capability']))}, needed: {need}"
    if SANITIZER in step.needs and not header["rehearsal"] and shutil.which(sanitizer) is None:
        return f"{sanitizer} was not found. It is part of the CUDA toolkit: SANITIZER=its path"
    return ""
