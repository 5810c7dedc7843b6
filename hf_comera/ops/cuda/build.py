"""Compiles the CUDA sources once into a shared library with a plain C interface and keeps it in a cache folder.

One library serves every torch version, since it knows nothing of torch. The same sources compile with g++ too, as an
emulation for tests. A build is keyed by sources, compiler and architecture, written beside its place and renamed
into it, under a file lock: several processes build once.

Loading a library runs its code, and its name in the cache follows from public sources. So folders are made for their
owner alone, and a folder or library that others own or may write is refused. The checks look at the opened file, not
at the file that a path means a moment later.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

__all__ = [
    "KernelBuild",
    "KernelBuildError",
    "build_emulated_library",
    "build_library",
    "cache_folder",
    "check_library",
    "compiler_version",
    "find_gcc",
    "find_nvcc",
    "is_built",
    "load_library",
    "make_own_folder",
    "sources_folder",
]

DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
INSTALL_NVCC = "Install the CUDA toolkit 12 or newer (https://developer.nvidia.com/cuda-downloads) or set CUDA_HOME."
FLAGS = ["-std=c++17", "-c"]


class KernelBuild(NamedTuple):
    """A finished build."""

    library: Path
    log: Path
    """Output of the compiler, with the resources of every kernel if it was nvcc."""


class _Compiler(NamedTuple):
    program: str
    version: str
    compile: list[str]
    link: list[str]


def sources_folder() -> Path:
    """Where the sources are: package data in an installed package, ``kernels/`` beside the package in a checkout.

    Raises:
        KernelBuildError: If neither is there.
    """
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "portable.h").is_file():
            return folder
    raise KernelBuildError(
        f"the CUDA sources are missing: neither {package / 'kernels'} nor {package.parent / 'kernels'} holds "
        "portable.h. Install hf_comera again."
    )


def find_nvcc() -> str | None:
    """The CUDA compiler: on the path, in ``$CUDA_HOME`` or ``$CUDA_PATH``, or in the usual place; None if nowhere."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), str(DEFAULT_CUDA_HOME)]
    found = [shutil.which("nvcc"), *(shutil.which("nvcc", path=str(Path(home) / "bin")) for home in homes if home)]
    return next((program for program in found if program), None)


def find_gcc() -> str | None:
    """The C++ compiler of the emulated build; None if it is not on the path."""
    return shutil.which("g++")


def compiler_version(program: str) -> str:
    """The version line of the compiler.

    Raises:
        KernelBuildError: If it does not run.
    """
    return _run([program, "--version"])


def build_library(architecture: str) -> KernelBuild:
    """The library for GPUs of one architecture (``sm_80``, ``sm_90a``, ...), built unless the cache has it.

    Raises:
        ValueError: If it is older than ``sm_80`` or no such name.
        KernelBuildError: If nvcc is missing or fails, or others may write to the cache.
    """
    return _build(_nvcc(architecture))


def is_built(architecture: str) -> bool:
    """Whether ``build_library`` would find its library in the cache.

    Raises:
        ValueError: As ``build_library``.
        KernelBuildError: If nvcc is missing, whose version is part of the key, or others may write to the cache.
    """
    library = _place(_nvcc(architecture)).library
    with _told_of_the_cache(library):
        if not library.is_file():
            return False
        check_library(library)
    return True


def build_emulated_library() -> KernelBuild:
    """The same sources compiled for the CPU, slow and exact about layouts; for tests.

    Raises:
        KernelBuildError: If g++ is missing or fails, or others may write to the cache.
    """
    program = find_gcc()
    if program is None:
        raise KernelBuildError("g++ was not found. Install it, for example with `apt install g++`.")
    options = [*FLAGS, "-O2", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DHF_COMERA_EMULATED"]
    return _build(_Compiler(program, compiler_version(program), [*options, "-x", "c++"], ["-shared"]))


def _nvcc(architecture: str) -> _Compiler:
    machine_code = _generate_code(architecture)
    program = find_nvcc()
    if program is None:
        raise KernelBuildError(f"nvcc, the CUDA compiler, was not found. {INSTALL_NVCC}")
    options = [*FLAGS, "-O3", "-Xcompiler", "-fPIC", "-Xptxas", "-v", machine_code]
    return _Compiler(program, compiler_version(program), options, ["-shared"])


def _generate_code(architecture: str) -> str:
    """The option that makes machine code for one architecture."""
    number = architecture.removeprefix("sm_")
    digits = number.rstrip("af")
    if not architecture.startswith("sm_") or not digits.isdigit() or int(digits) < 80:
        raise ValueError(
            f"architecture {architecture!r} is not supported: the kernels need tensor cores that do bf16, sm_80 or "
            "newer. Use for example 'sm_80' (A100), 'sm_89' (L4, RTX 40) or 'sm_90a' (H100, H200)."
        )
    return f"-gencode=arch=compute_{number},code=sm_{number}"


def _place(compiler: _Compiler) -> KernelBuild:
    folder = cache_folder() / "kernels" / _key(compiler)
    return KernelBuild(folder / "libhf_comera_kernels.so", folder / "build.log")


def _build(compiler: _Compiler) -> KernelBuild:
    build = _place(compiler)
    folder, parent = build.library.parent, build.library.parents[1]
    with _told_of_the_cache(build.library):
        make_own_folder(parent)
        if not build.library.is_file():
            with FileLock(parent / f"{folder.name}.lock"):
                if not build.library.is_file():
                    _compile_into(folder, compiler, build.library.name)
        check_library(build.library)
    return build


@contextlib.contextmanager
def _told_of_the_cache(library: Path) -> Iterator[None]:
    """Errors of the file system as one that says what to do."""
    try:
        yield
    except OSError as error:
        raise KernelBuildError(
            f"the cache {library.parents[1]} cannot be read and written: {error}. Set HF_COMERA_CACHE to a folder "
            "that can be."
        ) from error


def _key(compiler: _Compiler) -> str:
    """Changes with anything that changes the library."""
    digest = hashlib.sha256("\0".join([compiler.version, *compiler.compile, *compiler.link]).encode())
    folder = sources_folder()
    for path in sorted([*folder.glob("*.cu"), *folder.glob("*.h")]):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _compile_into(folder: Path, compiler: _Compiler, library: str) -> None:
    """Compile and link beside ``folder``, then rename into it."""
    sources = sorted(sources_folder().glob("*.cu"))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as name:
        work = Path(name) / "build"
        work.mkdir(mode=0o700)
        objects = [work / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler.program, *compiler.compile, str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=min(len(commands), os.cpu_count() or 1)) as pool:
            logs = list(pool.map(_run, commands))
        logs.append(_run([compiler.program, *compiler.link, *map(str, objects), "-o", str(work / library)]))
        (work / "build.log").write_text("".join(logs), encoding="utf-8")
        for path in objects:
            path.unlink()
        (work / library).chmod(0o700)  # linkers leave it to the umask
        work.rename(folder)


def _run(command: list[str]) -> str:
    """Run a compiler; its output.

    Raises:
        KernelBuildError: With all it printed, if it fails.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise KernelBuildError(f"{' '.join(command)}\nfailed with status {done.returncode}:\n{done.stdout.strip()}")
    return done.stdout


OPENED = Path("/proc/self/fd")
"""Where Linux names what a process has opened."""


class KernelBuildError(RuntimeError):
    """The kernels cannot be built or loaded here; the message says what is missing, refused, or what nvcc said."""


def cache_folder() -> Path:
    """``$HF_COMERA_CACHE``, else ``hf_comera`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    if own := os.environ.get("HF_COMERA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf_comera"


def make_own_folder(folder: Path) -> None:
    """Make ``folder``, and what is missing above it, for this user alone; check it where it is there.

    Raises:
        KernelBuildError: If others own it or may write there.
        OSError: If it cannot be made or opened.
    """
    for missing in [each for each in (*reversed(folder.parents), folder) if not each.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    with _opened(folder, os.O_DIRECTORY):
        pass


def check_library(library: Path) -> None:
    """Check a library, its folder and the one above, as ``load_library`` does, without loading it.

    Raises:
        KernelBuildError: If others own one of them or may write there.
        OSError: If one of them cannot be opened.
    """
    with _opened_library(library):
        pass


def load_library(library: Path) -> ctypes.CDLL:
    """Load a library that only this user (or root) can have written.

    Raises:
        KernelBuildError: If others own the library, its folder or the one above, or may write there.
        OSError: If it cannot be opened or loaded.
    """
    with _opened_library(library) as descriptor:
        # Stays open: loaders know libraries by name, and would take the next one with a number that is free again for
        # this one.
        opened = OPENED / str(os.dup(descriptor))
        return ctypes.CDLL(str(opened if opened.exists() else library))


@contextlib.contextmanager
def _opened_library(library: Path) -> Iterator[int]:
    """The library, opened in its folder, opened in the one above."""
    folder = library.parent
    with (
        _opened(folder.parent, os.O_DIRECTORY) as above,
        _opened(folder, os.O_DIRECTORY | os.O_NOFOLLOW, above) as inside,
        _opened(library, os.O_NOFOLLOW, inside) as descriptor,
    ):
        yield descriptor


@contextlib.contextmanager
def _opened(path: Path, flags: int, folder: int | None = None) -> Iterator[int]:
    """``path``, found by its last part where its folder is opened, after a look at what was opened."""
    descriptor = os.open(path if folder is None else path.name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        _check(path, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _check(path: Path, found: os.stat_result) -> None:
    user, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if found.st_uid not in (user, 0):
        trouble = f"belongs to user {found.st_uid}, not to user {user} who runs this (nor to root)"
        remedy = "Set HF_COMERA_CACHE to a folder of your own, for example in your home"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        trouble = f"has mode {mode:04o}, so that others may write to it"
        remedy = f"If nobody did, run `chmod -R go-w {path}`; else delete it or set HF_COMERA_CACHE to another place"
    else:
        return
    raise KernelBuildError(f"{path} in the cache of compiled kernels {trouble}; such a file is not loaded. {remedy}.")
