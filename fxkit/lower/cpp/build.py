"""From C++ text to a loaded library, through a cache that is the user's own.

A library is kept under a key made of the text, the flags, the compiler, the processor and torch's
version. It is built in a fresh folder and moved into place whole, under a lock that dies with the
process that holds it; torch's own lock, which outlives a killed build, never guards anything here.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import itertools
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fxkit import config
from fxkit.errors import BuildError
from fxkit.lower.cpp import toolchain
from fxkit.lower.cpp.toolchain import Toolchain

_LINES_OF_LOG = 3


@dataclass(frozen=True)
class Library:
    """A loaded library.

    Attributes:
        handle: Gives the functions by name.
        path: Where it lies.
        seconds: How long it took to build, or to find, and load.
        cache_hit: Whether it was there already.
    """

    handle: ctypes.CDLL
    path: Path
    seconds: float
    cache_hit: bool


def build(source: str) -> Library:
    """Return the library made from a header-free C++ text, from the cache when it is there.

    Raises:
        BuildError: When there is no compiler, or it fails.
    """
    start = time.perf_counter()
    tools = toolchain.current()
    key = _key(source, tools)
    folder = cache_folder()
    try:
        path, hit = _find_or_build(source, tools, key, folder)
    except OSError as error:
        folder = _fall_back(folder, error.strerror or str(error))
        path, hit = _find_or_build(source, tools, key, folder)
    return Library(_load(path), path, time.perf_counter() - start, hit)


def _key(source: str, tools: Toolchain) -> str:
    text = "\0".join([source, *tools.flags, tools.identity])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _find_or_build(source: str, tools: Toolchain, key: str, folder: Path) -> tuple[Path, bool]:
    path = folder / f"{key}.so"
    if _is_sound(path):
        return path, True
    with _locked(folder / f"lock-{key[:2]}"):
        if _is_sound(path):
            return path, True
        _build_into(path, source, tools, key)
    return path, False


def _is_sound(path: Path) -> bool:
    """Tell whether a library is there, is ours alone to write, and loads."""
    try:
        state = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        return False
    try:
        _load(path)
    except OSError:
        return False
    return True


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build_into(path: Path, source: str, tools: Toolchain, key: str) -> None:
    workplace = Path(tempfile.mkdtemp(prefix="build-", dir=path.parent))
    try:
        built = _compile(source, tools, f"fxkit_{key}", workplace)
        built.chmod(0o700)
        os.replace(built, path)
    except BuildError as error:
        if error.log and "No space left on device" in Path(error.log).read_text():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _compile(source: str, tools: Toolchain, name: str, workplace: Path) -> Path:
    """Compile with torch's `load_inline`, or with the compiler alone where that can't be used."""
    from torch.utils import cpp_extension

    torchs = shutil.which(cpp_extension.get_cxx_compiler())
    is_torchs = torchs is not None and Path(torchs).resolve() == Path(tools.compiler).resolve()
    if not is_torchs or shutil.which("ninja") is None or _has_precompiled_header():
        return _compile_directly(source, tools, name, workplace)
    # torch remembers by name what this process has built, also when the file is gone since.
    unique = f"{name}_{workplace.name.removeprefix('build-')}"
    try:
        cpp_extension.load_inline(
            unique,
            [source],
            extra_cflags=list(tools.flags),
            build_directory=str(workplace),
            is_python_module=False,
            no_implicit_headers=True,
        )
    except RuntimeError as error:
        raise _failure(str(error), workplace.parent, name) from error
    return workplace / f"{unique}.so"


def _has_precompiled_header() -> bool:
    """Tell whether torch holds a precompiled header, which `load_inline` would delete.

    See `remove_extension_h_precompiler_headers` in torch 2.13's cpp_extension.
    """
    import torch

    include = Path(torch.__file__).parent / "include" / "torch"
    return any(include.glob("extension.h.gch*"))


def _compile_directly(source: str, tools: Toolchain, name: str, workplace: Path) -> Path:
    text, built = workplace / "main.cpp", workplace / f"{name}.so"
    text.write_text(source)
    command = [tools.compiler, "-std=c++20", *tools.flags, "-fPIC", "-shared", str(text), "-o",
               str(built)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = f"FAILED: {built}\n{' '.join(command)}\n{done.stdout}{done.stderr}"
        raise _failure(output, workplace.parent, name)
    return built


def _failure(output: str, folder: Path, name: str) -> BuildError:
    log = folder / f"{name}.log"
    log.write_text(output)
    lines = output.splitlines()
    first = next((line for line in lines if re.search(r"\berror\b:", line)), "no error message")
    command = next((b for a, b in itertools.pairwise(lines) if "FAILED:" in a), None)
    return BuildError(
        f"expected the compiler to accept a kernel, got: {first.strip()}",
        command=command,
        log=str(log),
        hint="this graph runs in eager; please report it with the log",
    )


def cache_folder() -> Path:
    """Return the folder that keeps libraries: the configured one, or a private one if it is unfit.

    A folder is fit when it belongs to the user, nobody else may write to it, it is no link and it
    can be written.
    """
    asked = config.current().cache_dir / "kernels"
    replacement = _REPLACEMENTS.get(asked)
    if replacement is not None:
        return replacement
    try:
        asked.mkdir(mode=0o700, parents=True, exist_ok=True)
        objection = _objection(asked)
    except OSError as error:
        objection = error.strerror or str(error)
    return asked if objection is None else _fall_back(asked, objection)


def _objection(folder: Path) -> str | None:
    """Return why a folder is unfit to hold code that will be run, or None."""
    state = folder.lstat()
    if stat.S_ISLNK(state.st_mode):
        return "it is a symbolic link"
    if state.st_uid != os.getuid():
        return f"it belongs to user {state.st_uid}"
    if state.st_mode & 0o022:
        return "others may write to it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "it can't be written"
    return None


_REPLACEMENTS: dict[Path, Path] = {}


def _fall_back(unfit: Path, objection: str) -> Path:
    """Use a folder of this process alone in place of an unfit one, and say so once."""
    folder = _REPLACEMENTS.get(unfit)
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="fxkit-"))
        _REPLACEMENTS[unfit] = folder
        _remove_at_exit(folder)
        warnings.warn(
            f"expected a cache folder that is ours alone and can be written, got {unfit}: "
            f"{objection}\n  hint:  set FXKIT_CACHE_DIR; until then kernels are built anew in "
            "each process",
            stacklevel=2,
        )
    return folder


def _remove_at_exit(folder: Path) -> None:
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
