"""pyproject.toml and setup.cfg: the wheel holds every module and the data it reads, nothing else."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_FILES = ["pyproject.toml", "setup.cfg", "README.md", "LICENSE"]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def copied_sources(folder):
    """What a build reads, in a folder of its own, since setuptools leaves files beside its sources."""
    folder.mkdir()
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, folder)
    for name in ("hf_comera", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source, target = copied_sources(tmp_path_factory.mktemp("built") / "source"), tmp_path_factory.mktemp("wheel")
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
    expected |= {f"hf_comera/kernels/{path.name}" for path in (ROOT / "kernels").iterdir() if path.suffix != ".md"}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected


def test_finds_its_cuda_sources_where_it_is_installed(wheel, tmp_path):
    wheel.extractall(tmp_path)
    program = "from hf_comera.ops.cuda.build import sources_folder; print(sources_folder())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(tmp_path / "hf_comera" / "kernels"), done.stderr


def test_an_editable_install_works_beside_the_clone_and_finds_its_cuda_sources(tmp_path):
    """There the folder of the clone, which has the name of the package, is on the path and holds no package."""
    source, target = copied_sources(tmp_path / "hf_comera"), tmp_path / "wheel"
    target.mkdir()
    build = BUILD.replace("build_wheel", "build_editable")
    done = subprocess.run([sys.executable, "-c", build, target], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        f"import site; site.addsitedir({str(tmp_path / 'site')!r}); "
        "from hf_comera import ComeraConfig; "
        "from hf_comera.ops.cuda.build import sources_folder; print(sources_folder())"
    )
    path = os.pathsep.join([str(tmp_path / "site"), sysconfig.get_path("purelib")])  # -S: no .pth of other installs
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=source.parent,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(source / "kernels"), done.stderr


def test_carries_the_licence_and_the_readme(wheel):
    names = wheel.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in wheel.read(metadata).decode()
