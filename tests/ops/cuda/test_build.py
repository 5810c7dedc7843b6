"""hf_comera/ops/cuda/build.py: builds once, into the cache, and says what is missing or what the compiler said."""

import multiprocessing
import os
import shutil
import subprocess
import sys

import pytest

from hf_comera.ops.cuda import build as module
from hf_comera.ops.cuda.build import (
    KernelBuildError,
    build_emulated_library,
    build_library,
    cache_folder,
    find_nvcc,
    is_built,
    sources_folder,
)

SMALL_SOURCE = '#include "portable.h"\nextern "C" int answer() { return 42; }\n'
BROKEN_SOURCE = '#include "portable.h"\nint answer() { return forty_two; }\n'
WRITES_ITS_OUTPUT = 'echo "$@"; for word; do if [ "$before" = -o ]; then : > "$word"; fi; before=$word; done'

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture
def small_sources(tmp_path, monkeypatch):
    """A cache of its own, and one tiny source instead of the kernels."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("portable.h", "emulation.h"):
        shutil.copy(sources_folder() / name, folder)
    (folder / "answer.cu").write_text(SMALL_SOURCE)
    monkeypatch.setenv("HF_COMERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "sources_folder", lambda: folder)
    return folder


@pytest.fixture
def no_compilers(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(module, "DEFAULT_CUDA_HOME", tmp_path)


def pretend_compiler(folder, name, script):
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


@needs_gcc
def test_builds_once_and_again_when_a_source_changes(small_sources):
    first = build_emulated_library()
    assert first.library.is_file()
    assert build_emulated_library() == first
    stamp = first.library.stat().st_mtime_ns
    (small_sources / "answer.cu").write_text(SMALL_SOURCE.replace("42", "43"))
    second = build_emulated_library()
    assert second.library != first.library
    assert first.library.stat().st_mtime_ns == stamp
    left = {path.name for path in first.library.parents[1].iterdir() if path.is_dir()}
    assert left == {first.library.parent.name, second.library.parent.name}


@needs_gcc
def test_shows_what_the_compiler_said_and_leaves_nothing(small_sources):
    (small_sources / "answer.cu").write_text(BROKEN_SOURCE)
    with pytest.raises(KernelBuildError, match="forty_two"):
        build_emulated_library()
    assert not [path for path in (cache_folder() / "kernels").iterdir() if path.is_dir()]
    (small_sources / "answer.cu").write_text(SMALL_SOURCE)
    assert build_emulated_library().library.is_file()


def _build(_):
    return str(build_emulated_library().library)


@needs_gcc
def test_several_processes_build_once(small_sources, tmp_path, monkeypatch):
    real, count = shutil.which("g++"), tmp_path / "count"
    folder = pretend_compiler(tmp_path / "bin", "g++", f'echo "$1" >> {count}; exec {real} "$@"').parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert len(set(pool.map(_build, range(3), chunksize=1))) == 1
    calls = count.read_text().split()
    assert calls.count("-shared") == 1


def test_says_how_to_get_a_missing_compiler(no_compilers, small_sources):
    with pytest.raises(KernelBuildError, match=r"nvcc.* not found.*CUDA toolkit.*CUDA_HOME"):
        build_library("sm_90a")
    with pytest.raises(KernelBuildError, match=r"g\+\+ was not found.*apt install"):
        build_emulated_library()


def test_each_architecture_has_a_library_of_its_own(no_compilers, small_sources, tmp_path):
    pretend_compiler(tmp_path, "nvcc", WRITES_ITS_OUTPUT)
    older = build_library("sm_80")
    assert (is_built("sm_80"), is_built("sm_90a")) == (True, False)
    newer = build_library("sm_90a")
    assert is_built("sm_90a")
    assert newer.library != older.library
    for build, architecture in ((older, "80"), (newer, "90a")):
        assert f"arch=compute_{architecture},code=sm_{architecture} " in build.log.read_text()


def test_says_that_a_compiler_fails(no_compilers, small_sources, tmp_path, monkeypatch):
    program = pretend_compiler(tmp_path / "cuda" / "bin", "nvcc", 'echo "nvcc fatal: too old"; exit 1')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert find_nvcc() == str(program)
    with pytest.raises(KernelBuildError, match="nvcc fatal: too old"):
        build_library("sm_90a")


def test_says_that_the_cache_cannot_be_written(no_compilers, small_sources, tmp_path, monkeypatch):
    pretend_compiler(tmp_path, "nvcc", "echo version 1")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_COMERA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelBuildError, match="Set HF_COMERA_CACHE"):
        build_library("sm_90a")


@pytest.mark.parametrize("name", ["sm_75", "90", "sm_", "ampere", "compute_90"])
def test_refuses_other_architectures(name):
    with pytest.raises(ValueError, match=rf"'{name}' is not supported.*sm_90a"):
        build_library(name)


def test_says_that_the_sources_are_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "hf_comera" / "ops" / "cuda" / "build.py"))
    with pytest.raises(KernelBuildError, match=r"portable\.h"):
        sources_folder()


def test_importing_the_package_starts_no_compiler(tmp_path):
    for name in ("nvcc", "g++"):
        pretend_compiler(tmp_path, name, f"touch {tmp_path / 'started'}")
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-c", "import hf_comera, hf_comera.ops.cuda.library"], env=environment, check=True)
    assert not (tmp_path / "started").exists()
