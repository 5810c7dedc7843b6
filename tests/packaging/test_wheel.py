"""pyproject.toml and setup.cfg: the wheel holds every module and the data it reads, nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_FILES = ["pyproject.toml", "setup.cfg", "README.md", "LICENSE"]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, since setuptools leaves files beside its sources."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "hf_comera", source / "hf_comera", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-c", BUILD, target], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_holds_the_package_and_its_data(wheel):
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "hf_comera").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_carries_the_licence_and_the_readme(wheel):
    names = wheel.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in wheel.read(metadata).decode()
