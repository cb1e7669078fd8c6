"""Calls of a kernel's function: in this process, or in one of its own that may crash alone."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fxkit import config
from fxkit.authoring.kernels import sanitizer
from fxkit.errors import NumericsError
from fxkit.lower.building.build import load

_SECONDS = 60.0
_FILLS = (0xFF, 0x11)  # of floats: no number, and a small one
_READY = b"ready\n"
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class KernelMemory:
    """The tensors whose memory a function is given, in order.

    Attributes:
        names: Their names.
        tensors: The tensors; those behind the operands are written.
        operands: How many are only read.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    operands: int


class Executor(Protocol):
    """What calls a function of a library."""

    def __call__(self, function: str, memory: KernelMemory, numbers: bytes, threads: int) -> int:
        """Call a function, and return what it returns: 0 where it did its work."""
        ...


@dataclass(frozen=True)
class InProcess:
    """Calls functions in this process.

    Attributes:
        path: The library.
    """

    path: Path

    def address(self, function: str) -> int:
        """Return where a function lies."""
        return ctypes.cast(getattr(load(self.path), function), ctypes.c_void_p).value or 0

    def __call__(self, function: str, memory: KernelMemory, numbers: bytes, threads: int) -> int:
        called: Any = getattr(load(self.path), function)
        called.restype = ctypes.c_long
        kept = ctypes.create_string_buffer(numbers, max(8, len(numbers)))
        pointers = [tensor.data_ptr() for tensor in memory.tensors]
        pointers.append(ctypes.addressof(kept))
        gpu = next((tensor.device for tensor in memory.tensors if tensor.is_cuda), None)
        if gpu is not None:
            pointers.append(torch.cuda.current_stream(gpu).cuda_stream)
        with contextlib.nullcontext() if gpu is None else torch.cuda.device(gpu):
            return called((ctypes.c_void_p * len(pointers))(*pointers), ctypes.c_long(threads))


class Isolated:
    """Calls functions in a process of its own, and looks at what they do to memory.

    Args:
        path: The library.
        checked: Environment variables for a library that is built with sanitizers.

    Attributes:
        served: How many calls did their work.
    """

    def __init__(self, path: Path, checked: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._checked = checked
        self._said = tempfile.TemporaryFile() if checked is not None else None  # noqa: SIM115
        self.served = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        if self._said is not None:
            self._said.close()

    def __call__(self, function: str, memory: KernelMemory, numbers: bytes, threads: int) -> int:
        first, fault = self._run(function, memory, numbers, threads, _FILLS[0])
        again, _ = self._run(function, memory, numbers, threads, _FILLS[1])
        written = memory.tensors[memory.operands :]
        names = memory.names[memory.operands :]
        for name, tensor, one, other in zip(names, written, first, again, strict=True):
            if name == "workspace":
                continue
            if one != other and not fault:
                raise NumericsError(
                    f"expected {name} to be written whole, got a function that leaves in it, or "
                    "computes from, what its memory held before",
                    hint="each element of a result is written once; results and workspace begin "
                    "with any bytes",
                )
            if one:
                ctypes.memmove(tensor.data_ptr(), one, len(one))
        self.served += not fault
        return fault

    def _run(
        self, function: str, memory: KernelMemory, numbers: bytes, threads: int, fill: int
    ) -> tuple[list[bytes], int]:
        request = _Request(function, memory, numbers, threads, fill)
        try:
            return self._exchange(request, has_guards=True)
        except _Died as died:
            fault = self._reported(memory.names)
            if fault is not None:
                raise NumericsError(
                    f"expected a function that keeps to its memory, got {fault}"
                ) from None
            raise NumericsError(
                f"expected a function that returns, got one that {died}{self._why(request)}",
                hint="see what it reads and writes for these sizes and strides",
            ) from None

    def _reported(self, names: Sequence[str]) -> str | None:
        """Return what the sanitizers have said of the process that has ended."""
        if self._said is None:
            return None
        self._said.seek(0)
        return sanitizer.read_report(self._said.read().decode(errors="replace"), names)

    def _why(self, request: _Request) -> str:
        """Say what a function does that dies where memory is guarded."""
        try:
            self._exchange(request, has_guards=False)
        except _Died:
            return ""
        except NumericsError as error:
            return f": {error.message.partition('got ')[2]}"
        return ": it reads outside of the memory that it is given"

    def _exchange(self, request: _Request, has_guards: bool) -> tuple[list[bytes], int]:
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(request.content(has_guards))
            process.stdin.flush()
            answer = json.loads(self._line(process))
            sizes = request.sizes[request.memory.operands :]
            written = [self._read(process, size) for size in sizes]
        except (BrokenPipeError, EOFError):
            raise _Died(self._end()) from None
        request.check(answer)
        return written, answer["fault"]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-I", "-S", str(_WORKER), str(self._path), *_openmp()]
            if self._said is not None:
                self._said.truncate(0)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said or subprocess.DEVNULL,
                env=None if self._checked is None else config.environment_with(self._checked),
                bufsize=0,
            )
            try:
                said = self._line(self._process)
            except EOFError:
                raise _Died(f"does not load, {self._end()}") from None
            if said != _READY:
                self._end()
                raise _Died(f"does not load: {said.decode(errors='replace').strip()}")
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += self._read(process, 1)
        return line

    def _read(self, process: subprocess.Popen[bytes], size: int) -> bytes:
        assert process.stdout is not None
        content = bytearray()
        while len(content) < size:
            if not select.select([process.stdout], [], [], _SECONDS)[0]:
                process.kill()
                raise _Died(f"does not end within {_SECONDS:.0f} s")
            part = os.read(process.stdout.fileno(), min(size - len(content), 1 << 20))
            if not part:
                raise EOFError
            content += part
        return bytes(content)

    def _end(self) -> str:
        """End the process, and say how it has ended."""
        process, self._process = self._process, None
        if process is None:
            return "ends"
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return f"dies by {signal.Signals(-code).name}" if code < 0 else f"exits with {code}"


class _Died(Exception):
    """The process of a kernel has ended; says how."""


@dataclass(frozen=True)
class _Request:
    function: str
    memory: KernelMemory
    numbers: bytes
    threads: int
    fill: int

    @property
    def sizes(self) -> list[int]:
        return [_span(tensor) for tensor in self.memory.tensors]

    def content(self, has_guards: bool) -> bytes:
        read = self.memory.operands
        head = {
            "function": self.function,
            "sizes": self.sizes,
            "read": read,
            "numbers": len(self.numbers),
            "threads": self.threads,
            "fill": self.fill,
            "guards": has_guards,
        }
        operands = (
            ctypes.string_at(tensor.data_ptr(), size) if size else b""
            for tensor, size in zip(self.memory.tensors[:read], self.sizes, strict=False)
        )
        return b"".join([json.dumps(head).encode(), b"\n", *operands, self.numbers])

    def check(self, answer: dict[str, Any]) -> None:
        """Raise where memory was written that is not a result's."""
        for name, side in zip(self.memory.names, answer["strayed"], strict=True):
            if side is not None:
                raise NumericsError(
                    f"expected writes to results only, got some {side} the memory of {name}"
                )
        for name, is_changed in zip(self.memory.names, answer["changed"], strict=False):
            if is_changed:
                raise NumericsError(f"expected operands to stay, got writes to {name}")


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _openmp() -> Sequence[str]:
    """Return the OpenMP runtime that torch has loaded: kernels find theirs there."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    return sorted(set(re.findall(r"\S*/lib[gi]omp[^/\s]*\.so\S*", maps)))


_isolation = threading.local()


def isolated() -> Isolated | None:
    """Return the process that calls of this thread go to, or None."""
    return getattr(_isolation, "process", None)


@contextlib.contextmanager
def in_isolation(path: Path, checked: Mapping[str, str] | None = None) -> Iterator[Isolated]:
    """Let calls of this thread run in a process of their own inside of the block."""
    with Isolated(path, checked) as process:
        _isolation.process = process
        try:
            yield process
        finally:
            _isolation.process = None
