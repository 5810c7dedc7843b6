"""Compiles the CUDA sources once into a shared library with a plain C interface and keeps it in a cache folder.

One library serves every torch version, since it knows nothing of torch. The same sources compile with g++ too, as an
emulation for tests. A build is keyed by sources, compiler and architecture, written beside its place and renamed
into it, under a file lock: several processes build once.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from hf_comera.ops.cuda.cache import KernelBuildError, cache_folder, check_library, make_own_folder

__all__ = [
    "KernelBuild",
    "KernelBuildError",
    "build_emulated_library",
    "build_library",
    "cache_folder",
    "compiler_version",
    "find_gcc",
    "find_nvcc",
    "is_built",
    "sources_folder",
]

DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
INSTALL_NVCC = "Install the CUDA toolkit 12 or newer (https://developer.nvidia.com/cuda-downloads) or set CUDA_HOME."
FLAGS = ["-std=c++17", "-c"]


class KernelBuild(NamedTuple):
    """A finished build."""

    library: Path
    log: Path
    """What the compiler said, with the resources of every kernel where it was nvcc."""


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
    """What the compiler says of itself.

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
    """What a compiler printed.

    Raises:
        KernelBuildError: With all it printed, if it fails.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise KernelBuildError(f"{' '.join(command)}\nfailed with status {done.returncode}:\n{done.stdout.strip()}")
    return done.stdout
