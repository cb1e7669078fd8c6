"""What a compiled file leaves to libraries.

To look names up in the C library takes the linker longer than to link a kernel, and most kernels
call none of its functions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOLS = 2  # the type of a section
_FOUND_AT_LOADING = ("GOMP_", "omp_")  # in the runtime of OpenMP that torch has loaded
_OF_THE_LINKER = "_GLOBAL_OFFSET_TABLE_"


def may_need_libraries(path: Path) -> bool:
    """Tell whether an object file calls what is not in it, OpenMP left out, or can't be read."""
    content = path.read_bytes()
    if not content.startswith(_ELF64_LITTLE_ENDIAN):
        return True
    return any(
        not name.startswith(_FOUND_AT_LOADING) and name != _OF_THE_LINKER
        for name in _undefined(content)
    )


def _undefined(content: bytes) -> Iterator[str]:
    """Yield the names that an object file uses and does not define.

    Source: the System V ABI's chapter on object files, ELF-64.
    """
    first, _, _, _, _, size, count = struct.unpack_from("<QIHHHHH", content, 40)
    sections = [_SECTION.unpack_from(content, first + size * index) for index in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind != _SYMBOLS:
            continue
        names = sections[link][4]
        for place in range(offset + _SYMBOL.size, offset + length, _SYMBOL.size):  # the first: none
            name, _, _, section, _, _ = _SYMBOL.unpack_from(content, place)
            if section == 0:
                start = names + name
                yield content[start : content.index(b"\0", start)].decode()
