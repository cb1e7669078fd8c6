"""Runs a library's functions in a process of its own, over memory with guards around it.

It is started with this file as its script, and knows neither torch nor fxkit. Each request is a
line of JSON and the bytes of what is read; each answer a line of JSON and the bytes of what was
written. Memory ends before some that nobody may touch, and what is read can't be written: a
kernel that goes astray ends this process, and no other.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from typing import Any, BinaryIO

_PAGE = mmap.PAGESIZE
_GUARD = 16 * _PAGE
_ALIGNMENT = 64
_CANARY = 0xA5
_NOTHING, _READ, _WRITE = 0, 1, 3

_c = ctypes.CDLL(None)
_c.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# Of AddressSanitizer, where its runtime is loaded: lets it report accesses to some memory, or not.
_POISON: Any = getattr(_c, "__asan_poison_memory_region", None)
_UNPOISON: Any = getattr(_c, "__asan_unpoison_memory_region", None)
for _function in filter(None, (_POISON, _UNPOISON)):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class GuardedMemory:
    """Some bytes between two guards that nobody may touch.

    Args:
        size: How many.
        has_guards: Whether that is enforced; else bytes around are only looked at later.
    """

    def __init__(self, size: int, has_guards: bool) -> None:
        inner = max(1, -(-(size + _ALIGNMENT) // _PAGE)) * _PAGE
        self.size, self._inner, self._has_guards = size, inner, has_guards
        self._map = mmap.mmap(-1, inner + 2 * _GUARD)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + _GUARD
        self.offset = (inner - size) // _ALIGNMENT * _ALIGNMENT
        self.address = self._begin + self.offset
        ctypes.memset(self._begin - _GUARD, _CANARY, inner + 2 * _GUARD)
        if has_guards:
            for guard in (self._begin - _GUARD, self._begin + inner):
                _c.mprotect(guard, _GUARD, _NOTHING)

    def fill(self, content: bytes | int) -> None:
        """Write bytes, or one byte everywhere."""
        if isinstance(content, int):
            ctypes.memset(self.address, content, self.size)
        else:
            ctypes.memmove(self.address, content, self.size)

    def close(self) -> None:
        """Let nobody write to it any more."""
        if self._has_guards:
            _c.mprotect(self._begin, self._inner, _READ)

    def poison(self) -> None:
        """Let AddressSanitizer report accesses around the bytes, where it is loaded."""
        if _POISON is not None:
            end = self.address + self.size
            _POISON(self._begin, self.offset)
            _POISON(end, self._begin + self._inner - end)

    def unpoison(self) -> None:
        """Undo `poison`."""
        if _UNPOISON is not None:
            _UNPOISON(self._begin, self._inner)

    def content(self) -> bytes:
        """Return the bytes."""
        return ctypes.string_at(self.address, self.size)

    def strayed(self) -> str | None:
        """Tell on which side bytes around it were written, or None."""
        margin = 0 if self._has_guards else _GUARD
        before = ctypes.string_at(self._begin - margin, self.offset + margin)
        end = self._inner - self.offset - self.size + margin
        behind = ctypes.string_at(self.address + self.size, end)
        sides = (("before", before), ("behind", behind))
        return next((n for n, told in sides if told.strip(bytes([_CANARY]))), None)

    def free(self) -> None:
        """Give it back."""
        if self._has_guards:
            _c.mprotect(self._begin - _GUARD, self._inner + 2 * _GUARD, _WRITE)


def _tell_places(memory: list[GuardedMemory]) -> None:
    """Write where memory lies, before a report of AddressSanitizer that tells addresses."""
    for number, part in enumerate(memory):
        sys.stderr.write(f"fxkit memory {number} {part.address} {part.size}\n")
    sys.stderr.flush()


def _serve(requests: BinaryIO, answers: BinaryIO, library: ctypes.CDLL) -> None:
    while line := requests.readline():
        request = json.loads(line)
        memory = [GuardedMemory(size, request["guards"]) for size in request["sizes"]]
        contents = []
        for place, (part, size) in enumerate(zip(memory, request["sizes"], strict=True)):
            if place < request["read"]:
                contents.append(requests.read(size))
                part.fill(contents[-1])
                part.close()
            else:
                part.fill(request["fill"])
        if _POISON is not None:
            _tell_places(memory)
        numbers = requests.read(request["numbers"])
        kept = ctypes.create_string_buffer(numbers, max(8, len(numbers)))
        pointers = [*(part.address for part in memory), ctypes.addressof(kept)]
        function = getattr(library, request["function"])
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_long
        given = (ctypes.c_void_p * len(pointers))(*pointers)
        for part in memory:
            part.poison()
        fault = function(given, request["threads"])
        for part in memory:
            part.unpoison()
        strayed = [part.strayed() for part in memory]
        changed = [part.content() != told for part, told in zip(memory, contents, strict=False)]
        answer = {"fault": fault, "strayed": strayed, "changed": changed}
        answers.write(json.dumps(answer).encode() + b"\n")
        for part in memory[request["read"] :]:
            answers.write(part.content())
        answers.flush()
        for part in memory:
            part.free()


def main(path: str, *needed: str) -> None:
    """Serve requests from standard input until it ends.

    Args:
        path: The library.
        needed: Libraries that it takes functions from.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the kernel prints is no answer
    for name in needed:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        answers.write(f"{str(error).splitlines()[0]}\n".encode())
        return
    answers.write(b"ready\n")
    answers.flush()
    _serve(sys.stdin.buffer, answers, library)


if __name__ == "__main__":
    main(*sys.argv[1:])
