"""The checked build of a kernel: with the compiler's sanitizers, which tell the line of a fault.

The library is built with AddressSanitizer and UndefinedBehaviorSanitizer, and runs in a process of
its own that has their runtimes loaded before all else. The memory of operands and results is
poisoned around, so that the first access outside of it is reported with the line of the user's own
file. Faults on the function's stack and heap are found as well.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fxkit.errors import UnsupportedError
from fxkit.lower.building import toolchain

FLAGS = (
    "-g", "-O1", "-fno-omit-frame-pointer", "-fno-openmp-simd",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
)  # fmt: skip

# What the sanitizers do: no search for leaks, which the interpreter has; an end at the first fault.
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:color=never:abort_on_error=0:handle_abort=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=0:color=never",
}

_ADDRESS = re.compile(r"ERROR: AddressSanitizer: (\S+)(?: on (?:unknown )?address (0x[0-9a-f]+))?")
_ACCESS = re.compile(r"^(READ|WRITE) of size (\d+)|caused by a (READ|WRITE) memory", re.MULTILINE)
_FRAME = re.compile(r"^\s*#\d+ 0x[0-9a-f]+ in (.+) (\S+?):(\d+)(?::\d+)?$", re.MULTILINE)
_UNDEFINED = re.compile(r"^(\S+?):(\d+):\d+: runtime error: (.*)$", re.MULTILINE)
_MEMORY = re.compile(r"^fxkit memory (\d+) (\d+) (\d+)$", re.MULTILINE)

# Where the sources of libraries lie, in the reports of debug information.
_OF_THE_SYSTEM = ("/usr/", "./", "../")

# So far from a tensor's memory an address is told by it.
_NEAR = 1 << 16


@functools.cache
def runtimes(compiler: str) -> tuple[str, ...]:
    """Return the sanitizers' libraries, which come with a compiler; empty where it has none."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [compiler, f"-print-file-name={name}"]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if not Path(told).is_file():
            return ()
        found.append(str(Path(told).resolve()))
    return tuple(found)


def environment() -> dict[str, str]:
    """Return the environment variables of a process that runs checked libraries.

    Raises:
        UnsupportedError: Where the compiler brings no sanitizers.
        BuildError: Where there is no compiler.
    """
    compiler = toolchain.current().compiler
    preloaded = runtimes(compiler)
    if not preloaded:
        raise UnsupportedError(
            f"expected a compiler with AddressSanitizer for a checked build, got {compiler}, which "
            "brings no libasan.so and libubsan.so",
            hint="use g++ with its libasan, or prove without checked=True",
        )
    return {**_OPTIONS, "LD_PRELOAD": ":".join(preloaded)}


def read_report(text: str, names: Sequence[str]) -> str | None:
    """Return what a report of the sanitizers says, and where; None where it is none.

    Args:
        text: What the process has written, with the places of memory before it.
        names: Names of the tensors whose places it tells.
    """
    undefined = _UNDEFINED.search(text)
    if undefined is not None:
        file, line, what = undefined.groups()
        return f"undefined behaviour at {Path(file).name}:{line}: {what}"
    found = _ADDRESS.search(text)
    if found is None:
        return None
    access = _ACCESS.search(text)
    kind = "" if access is None else (access[1] or access[3]).lower()
    size = f" of {access[2]} bytes" if access is not None and access[2] else ""
    place = _place(int(found[2], 16), text, names) if found[2] else None
    what = f"a {kind}{size}" if kind else "a fault"
    return f"{what}{_source(text)}: {place if place and kind else found[1]}"


def _place(address: int, text: str, names: Sequence[str]) -> str | None:
    """Say where an address lies beside the memory of tensors."""
    nearest: tuple[int, str] = _NEAR, ""
    for told in _MEMORY.finditer(text):
        number, begin, size = map(int, told.groups())
        memory = f"the memory of {names[number]}, which has {size} bytes"
        if begin <= address < begin + size:
            return f"byte {address - begin} of {names[number]}, which has {size}"
        away, side = (begin - address, "before") if address < begin else (
            address - begin - size, "behind")  # fmt: skip
        nearest = min(nearest, (away, f"{away} bytes {side} {memory}"))
    return nearest[1] or None


def _source(text: str) -> str:
    """Return the first line in the stack of a report that is no system's, as ` at file:line`."""
    report = text[text.index("ERROR: AddressSanitizer") :]
    for function, file, line in _FRAME.findall(report):
        if not file.startswith(_OF_THE_SYSTEM):
            return f" at {Path(file).name}:{line} in {function.partition('(')[0]}"
    return ""
