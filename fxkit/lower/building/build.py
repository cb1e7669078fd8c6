"""From C++ text to a loaded library, through a cache that is the user's own.

A library is kept under a key made of the text, the flags, the compiler, the processor and torch's
version. It is built in a fresh folder and moved into place whole, under a lock that dies with the
process that holds it; torch's own lock, which outlives a killed build, never guards anything here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import itertools
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fxkit import config
from fxkit.errors import BuildError
from fxkit.lower.building import deadline, object_file, toolchain
from fxkit.lower.building.toolchain import Linking, Toolchain

_LOCK_SECONDS = 120.0
_STALE_SECONDS = 3600.0  # no build takes so long: what lies there was left by a killed process
_SEAL = b"fxkit sha256 "
_ALONE = Linking()


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


def build(*texts: str, tools: Toolchain | None = None) -> Library:
    """Return the library made from texts, from the cache when it is there.

    Each text is a translation unit; two are compiled at once.

    Args:
        texts: C++, or what `tools` compile.
        tools: What to build with; the toolchain for C++ when left out.

    Raises:
        BuildError: When there is no compiler, it fails, or there is nowhere to write.
        DeadlinePassed: When there is a `deadline`, and it comes first.
    """
    start = time.perf_counter()
    path, hit = library_path(*texts, tools=tools)
    return Library(load(path), path, time.perf_counter() - start, hit)


def library_path(
    *texts: str, linking: Linking = _ALONE, tools: Toolchain | None = None
) -> tuple[Path, bool]:
    """Return where the library made from some texts lies, and whether it was there already.

    Raises:
        BuildError: When there is no compiler, it fails, or there is nowhere to write.
    """
    order = Order(texts, tools or toolchain.current(), linking)
    folder = cache_folder()
    try:
        return _find_or_build(order, folder)
    except OSError as error:
        folder = _fall_back(folder, error.strerror or str(error))
    try:
        return _find_or_build(order, folder)
    except OSError as error:
        raise BuildError(
            f"expected a folder that a kernel can be built in, got {folder}: {error}",
            hint="make room on the disk, or set FXKIT_CACHE_DIR",
        ) from error


def is_built(*texts: str, linking: Linking = _ALONE, tools: Toolchain | None = None) -> bool:
    """Tell whether the library made from some texts is there already."""
    try:
        order = Order(texts, tools or toolchain.current(), linking)
        return _is_sound(cache_folder() / f"{order.key}.so")
    except (BuildError, OSError):
        return False


@dataclass(frozen=True)
class Order:
    """What is to be built, with what."""

    texts: tuple[str, ...]
    tools: Toolchain
    linking: Linking

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags for compiling."""
        if self.is_bare:
            return (*self.tools.flags, *self.tools.bare_flags)
        return self.linking.flags or self.tools.flags

    @functools.cached_property
    def is_bare(self) -> bool:
        """Whether the texts use neither a header nor, therefore, the C++ library."""
        return self.linking == _ALONE and not any("#include" in text for text in self.texts)

    @property
    def link_flags(self) -> tuple[str, ...]:
        """Flags for the linker."""
        return self.tools.bare_link if self.is_bare else self.linking.link_flags

    @functools.cached_property
    def key(self) -> str:
        """A name that no other library has."""
        linking = (*self.link_flags, self.linking.identity)
        parts = (*self.texts, *self.flags, self.tools.identity, *linking)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _find_or_build(order: Order, folder: Path) -> tuple[Path, bool]:
    path = folder / f"{order.key}.so"
    if _is_sound(path):
        return path, True
    with _locked(folder / f"lock-{order.key[:2]}"):
        if _is_sound(path):
            return path, True
        _build_into(path, order)
    return path, False


def _is_sound(path: Path) -> bool:
    """Tell whether a library is there, is ours alone to write, and is what was built."""
    try:
        state = path.lstat()
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
            return False
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    built, seal = content[: -len(_seal(b""))], content[-len(_seal(b"")) :]
    return seal == _seal(built)


def _seal(content: bytes) -> bytes:
    """Return what follows a library in its file: to load a damaged one may kill the process."""
    return _SEAL + hashlib.sha256(content).digest()


@functools.cache
def load(path: Path) -> ctypes.CDLL:
    """Load a library; raise `BuildError` where it does not load."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"expected a library that loads, got {error}",
            library=str(path),
            hint="remove the file if it was copied from elsewhere",
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system drops when its holder dies; go on without it after a while."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _wait_for(descriptor)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has it too
        os.close(descriptor)


def _wait_for(descriptor: int) -> None:
    """Wait until a lock is had. Who holds it for long hangs: what is built twice does no harm."""
    deadline = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.005)
        else:
            return


def _build_into(path: Path, order: Order) -> None:
    _remove_stale(path.parent)
    workplace = Path(tempfile.mkdtemp(prefix="build-", dir=path.parent))
    try:
        built = _compile(order, f"fxkit_{order.key}", workplace)
        content = built.read_bytes()
        sealed = workplace / "sealed"
        sealed.write_bytes(content + _seal(content))
        sealed.chmod(0o700)
        os.replace(sealed, path)
    except BuildError as error:
        if error.log and "No space left on device" in Path(error.log).read_text():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


@functools.cache
def _remove_stale(folder: Path) -> None:
    """Remove the workplaces of builds that did not come to their end, once in a process."""
    for workplace in folder.glob("build-*"):
        with contextlib.suppress(OSError):
            if time.time() - workplace.lstat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(workplace, ignore_errors=True)


def _compile(order: Order, name: str, workplace: Path) -> Path:
    """Compile kernels with the compiler alone, which takes half as long as torch's `load_inline`.

    That serves what is linked with torch, and is known to where torch is; where it can't be used,
    the compiler alone does that too.
    """
    if not order.linking.libraries:
        return _compile_directly(order, name, workplace)
    from torch.utils import cpp_extension

    torchs = shutil.which(cpp_extension.get_cxx_compiler())
    is_torchs = (
        torchs is not None and Path(torchs).resolve() == Path(order.tools.compiler).resolve()
    )
    is_simple = is_torchs and len(order.texts) == 1
    if not is_simple or shutil.which("ninja") is None or _has_precompiled_header():
        return _compile_directly(order, name, workplace)
    # torch remembers by name what this process has built, also when the file is gone since.
    unique = f"{name}_{workplace.name.removeprefix('build-')}"
    try:
        cpp_extension.load_inline(
            unique,
            list(order.texts),
            extra_cflags=list(order.flags),
            extra_include_paths=list(order.linking.includes),
            extra_ldflags=list(order.linking.link_flags),
            build_directory=str(workplace),
            is_python_module=False,
            no_implicit_headers=True,
        )
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk; what does not load has no number
        output = f"{error}\n{error.__cause__ or ''}"
        raise _failure(output, workplace.parent, name) from error
    return workplace / f"{unique}.so"


def _has_precompiled_header() -> bool:
    """Tell whether torch holds a precompiled header, which `load_inline` would delete.

    See `remove_extension_h_precompiler_headers` in torch 2.13's cpp_extension.
    """
    import torch

    include = Path(torch.__file__).parent / "include" / "torch"
    return any(include.glob("extension.h.gch*"))


def _compile_directly(order: Order, name: str, workplace: Path) -> Path:
    """Compile each text by a process of its own, all at once, and link them."""
    tools, linking = order.tools, order.linking
    first = [tools.compiler, "-std=c++20", *order.flags, *tools.library_flags]
    first += [f"-I{folder}" for folder in linking.includes]
    built = workplace / f"{name}.so"
    objects = [workplace / f"unit{number}.o" for number in range(len(order.texts))]
    commands = []
    for text, compiled in zip(order.texts, objects, strict=True):
        source = compiled.with_suffix(".cpp") if len(objects) > 1 else workplace / "main.cpp"
        source.write_text(text)
        commands.append([*first, "-c", str(source), "-o", str(compiled)])
    # No runtime of OpenMP is linked: calls find that which torch has loaded.
    _run_all(commands, built, workplace.parent, name)
    flags = order.link_flags
    if order.is_bare and not any(map(object_file.may_need_libraries, objects)):
        flags = tools.bare_link_alone
    link = [tools.compiler, "-shared", *map(str, objects), "-o", str(built), *flags]
    _run_all([link], built, workplace.parent, name)
    return built


def _run_all(commands: list[list[str]], built: Path, folder: Path, name: str) -> None:
    """Run commands at once; all have ended when this returns or raises."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    apart = deadline.remaining() is not None  # to be ended with the processes that they start
    running = [
        subprocess.Popen(command, stdout=pipe, stderr=both, text=True, start_new_session=apart)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=deadline.remaining())[0] for process in running]
    except (subprocess.TimeoutExpired, deadline.DeadlinePassed):
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise deadline.DeadlinePassed from None
    for process, command, output in zip(running, commands, outputs, strict=True):
        if process.returncode:
            raise _failure(f"FAILED: {built}\n{' '.join(command)}\n{output}", folder, name)


def _failure(output: str, folder: Path, name: str) -> BuildError:
    log = folder / f"{name}.log"
    log.write_text(output)
    lines = output.splitlines()
    errors = (line for line in lines if re.search(r"\berror\b:|undefined symbol", line))
    first = next(errors, "no error message")
    command = next((b for a, b in itertools.pairwise(lines) if "FAILED:" in a), None)
    return BuildError(
        f"expected the compiler to accept a kernel, got: {first.strip()}",
        command=command,
        log=str(log),
        hint="the log has all that the compiler said",
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
