"""hf_comera/ops/cuda/build.py: a library that others own or could have written is never loaded."""

import os
import shutil
import stat
import subprocess

import pytest

from hf_comera.ops.cuda import build
from hf_comera.ops.cuda.build import (
    KernelBuildError,
    build_emulated_library,
    cache_folder,
    check_library,
    load_library,
    make_own_folder,
)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
STRANGER = 12345


def compiled(path, answer, marker="/dev/null"):
    """A library that writes to ``marker`` when it is loaded."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    source = path.with_suffix(".cpp")
    source.write_text(
        "#include <cstdio>\n"
        f'extern "C" int answer() {{ return {answer}; }}\n'
        f'__attribute__((constructor)) static void load() {{ fclose(fopen("{marker}", "w")); }}\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    path.chmod(0o700)
    return path


@pytest.fixture
def planted(tmp_path):
    """A library in its folder in a cache, and the file that appears when it is loaded."""
    marker = tmp_path / "loaded"
    return compiled(tmp_path / "kernels" / "0123" / "library.so", 42, marker), marker


def give_to_a_stranger(path, monkeypatch):
    """Another owner; who is not root cannot give anything away, and becomes the stranger."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:
        monkeypatch.setattr(build.os, "geteuid", lambda: STRANGER)


def test_what_only_the_user_can_write_is_loaded(planted):
    library, marker = planted
    check_library(library)
    assert not marker.exists()
    assert load_library(library).answer() == 42
    assert marker.exists()


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777], ids=oct)
@pytest.mark.parametrize("level", [0, 1, 2], ids=["library", "folder", "folder-above"])
def test_what_others_may_write_is_refused(level, mode, planted):
    library, marker = planted
    place = [library, *library.parents][level]
    place.chmod(mode)
    for look in (check_library, load_library):
        with pytest.raises(KernelBuildError) as refused:
            look(library)
        for word in (f"{place} ", f"has mode {mode:04o}", f"chmod -R go-w {place}", "delete it"):
            assert word in str(refused.value)
    assert not marker.exists()
    place.chmod(0o755)
    assert load_library(library).answer() == 42


@pytest.mark.parametrize("level", [0, 1, 2], ids=["library", "folder", "folder-above"])
def test_what_others_own_is_refused(level, planted, monkeypatch):
    library, marker = planted
    give_to_a_stranger([library, *library.parents][level], monkeypatch)
    with pytest.raises(KernelBuildError, match=r"belongs to user \d+, not to user \d+ .*Set HF_COMERA_CACHE"):
        load_library(library)
    assert not marker.exists()


@pytest.mark.parametrize("level", [0, 1], ids=["library", "folder"])
def test_a_link_is_not_followed(level, planted, tmp_path):
    library, marker = planted
    place = [library, library.parent][level]
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        load_library(library)
    assert not marker.exists()


def test_what_was_checked_is_what_is_loaded(planted, tmp_path, monkeypatch):
    library, _ = planted
    other = compiled(tmp_path / "kernels" / "4567" / "library.so", 43)
    load = build.ctypes.CDLL

    def exchange_and_load(name):
        other.rename(library)
        return load(name)

    monkeypatch.setattr(build.ctypes, "CDLL", exchange_and_load)
    assert load_library(library).answer() == 42


def test_each_library_is_loaded_as_itself(tmp_path):
    libraries = [compiled(tmp_path / "kernels" / str(answer) / "library.so", answer) for answer in range(3)]
    assert [load_library(library).answer() for library in libraries] == [0, 1, 2]


@pytest.fixture
def small_cache(tmp_path, monkeypatch):
    """A cache that is not there yet, for the smallest of the sources."""
    for name in ("library.cu", "portable.h", "emulation.h"):
        (tmp_path / name).symlink_to(build.sources_folder() / name)
    monkeypatch.setattr(build, "sources_folder", lambda: tmp_path)
    monkeypatch.setenv("HF_COMERA_CACHE", str(tmp_path / "shared" / "cache"))
    return tmp_path / "shared" / "cache"


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o022], ids=oct)
def test_a_build_is_its_owners_alone_whatever_the_umask(umask, small_cache):
    before = os.umask(umask)
    try:
        library = build_emulated_library().library
    finally:
        os.umask(before)
    for place in [library, *library.parents][:5]:
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert small_cache.parent in library.parents
    assert load_library(library).hf_comera_trial_launch(None) == 0


def test_no_build_starts_from_what_others_may_write(small_cache, monkeypatch):
    (small_cache / "kernels").mkdir(parents=True)
    (small_cache / "kernels").chmod(0o775)
    monkeypatch.setattr(build, "_compile_into", lambda *_: pytest.fail("it was compiled"))
    with pytest.raises(KernelBuildError, match=r"kernels .*has mode 0775"):
        build_emulated_library()


def test_a_planted_build_is_refused(small_cache):
    library = build_emulated_library().library
    library.chmod(0o720)
    with pytest.raises(KernelBuildError, match=r"has mode 0720"):
        build_emulated_library()
    shutil.rmtree(library.parent)
    assert build_emulated_library().library == library


def test_a_folder_that_is_there_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    make_own_folder(tmp_path / "new")
    assert [stat.S_IMODE(place.stat().st_mode) for place in (tmp_path, tmp_path / "new")] == [0o755, 0o700]


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_COMERA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "hf_comera"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "hf_comera"
    monkeypatch.setenv("HF_COMERA_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
