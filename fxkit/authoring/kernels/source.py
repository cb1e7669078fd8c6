"""The text of a user's kernel: where it lies, what it includes, and the library made of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxkit.errors import UnsupportedError
from fxkit.lower.building import cuda_toolchain, toolchain
from fxkit.lower.building.build import library_path
from fxkit.lower.building.toolchain import Linking, Toolchain

# What stands for elements of bfloat16 on the processor: the upper half of a float32.
_BFLOAT16 = """
#include <cstdint>
struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  bfloat16(float value) {
    uint32_t word;
    __builtin_memcpy(&word, &value, 4);
    bits = value != value ? 0x7fc0 : (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
  operator float() const {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    __builtin_memcpy(&value, &word, 4);
    return value;
  }
};
"""

FOUND = "fx_found"
"""The name under which a function of a library is called; null where the library lacks it."""

_DECLARATION = """#include <cstdint>
#include <dlfcn.h>
extern "C" {{
{declared};
}}
static const auto {found} = (decltype(&{name}))dlsym(dlopen("{path}", RTLD_NOW), "{name}");
"""

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A C++ or CUDA text.

    Attributes:
        text: The text.
        path: The file that it was read from, or None.
        is_cuda: Whether nvcc compiles it.
        flags: More flags for the compiler.
        library: The library that has the function, where the text only declares it.
    """

    text: str
    path: Path | None
    is_cuda: bool = False
    flags: tuple[str, ...] = ()
    library: Path | None = None

    @property
    def place(self) -> str:
        """What messages call it."""
        if self.library is not None:
            return f"the signature for {self.library.name}"
        return "the text" if self.path is None else self.path.name

    @property
    def lines_before(self) -> int:
        """How many lines of the text come before what the user wrote."""
        before = _DECLARATION.partition("{declared}")[0]
        return 0 if self.library is None else before.count("\n")

    @property
    def tools(self) -> Toolchain:
        """What it is built with; raises `BuildError` where there is none."""
        return cuda_toolchain.current() if self.is_cuda else toolchain.current()

    @property
    def key(self) -> str:
        """A text that differs where the kernel does."""
        return "\0".join((self.text, *self.flags, self._included()))

    def build(self, wrapper: str, more: Sequence[str] = ()) -> tuple[Path, bool]:
        """Return the library of the text and of the functions that call it; it is not loaded.

        Args:
            wrapper: The functions that call it.
            more: More flags for the compiler.

        Returns:
            Where it lies, and whether it was there already.

        Raises:
            BuildError: With the first error, at the file and line of the user's own.
        """
        shown = str(self.path).replace("\\", "\\\\") if self.path else "kernel"
        head = _BFLOAT16 if self._uses_bfloat16 else ""
        text = f'{head}#line 1 "{shown}"\n{self.text}\n#line 1 "call"\n{wrapper}'
        return library_path(text, tools=self.tools, linking=self._linking(more))

    def _linking(self, more: Sequence[str]) -> Linking:
        folder = () if self.path is None else (str(self.path.parent),)
        flags = (*self.tools.flags, *self.flags, *more)
        return Linking(includes=folder, flags=flags, identity=self._included())

    @property
    def _uses_bfloat16(self) -> bool:
        """Whether it uses fxkit's `bfloat16`, and has no type of that name itself."""
        is_own = re.search(r"(struct|class|using)\s+bfloat16\b|\bbfloat16\s*;", self.text)
        return not self.is_cuda and is_own is None

    def _included(self) -> str:
        """Return a digest of what it stands on beside its text, or "" for nothing."""
        if self.library is not None:
            return hashlib.sha256(self.library.read_bytes()).hexdigest()
        if self.path is None:
            return ""
        seen: dict[Path, str] = {}
        queue = [(self.path.parent, self.text)]
        while queue:
            folder, text = queue.pop()
            for name in _INCLUDE.findall(text):
                header = (folder / name).resolve()
                if header in seen or not header.is_file():
                    continue
                seen[header] = header.read_text(errors="replace")
                queue.append((header.parent, seen[header]))
        if not seen:
            return ""
        content = "\0".join(f"{header}\0{text}" for header, text in sorted(seen.items()))
        return hashlib.sha256(content.encode()).hexdigest()


def library_source(library: str | Path, folder: Path, signature: str) -> KernelSource:
    """Return a source that calls a function of a library that is there already.

    Args:
        library: Its path, from the user's own file on.
        folder: The folder of that file.
        signature: The function, as C declares it.

    Raises:
        UnsupportedError: When there is no such file.
    """
    path = (folder / library).expanduser().resolve()
    if not path.is_file():
        raise UnsupportedError(
            f"expected a library, got {library!s}, and there is no {path}",
            hint="paths begin at the file that calls fxkit.kernel",
        )
    declared = signature.strip().removesuffix(";")
    name = declared.partition("(")[0].split()[-1]
    shown = str(path).replace("\\", "\\\\").replace('"', '\\"')
    text = _DECLARATION.format(declared=declared, found=FOUND, name=name, path=shown)
    return KernelSource(text, None, library=path)


def read_source(
    given: str | Path, folder: Path, *, is_cuda: bool, flags: tuple[str, ...]
) -> KernelSource:
    """Return the source that a user names: a path, from his own file on, or the text itself.

    Args:
        given: What he gave.
        folder: The folder of his file.
        is_cuda: Whether it is CUDA.
        flags: More flags for the compiler.

    Raises:
        UnsupportedError: When there is no such file.
    """
    if isinstance(given, str) and ("{" in given or "\n" in given):
        return KernelSource(given, None, is_cuda, flags)
    path = (folder / given).expanduser()
    if not path.is_file():
        raise UnsupportedError(
            f"expected a file or the text of a kernel, got {str(given)!r}, and there is no {path}",
            hint="paths begin at the file that calls fxkit.kernel",
        )
    try:
        return KernelSource(path.read_text(), path.resolve(), is_cuda, flags)
    except UnicodeDecodeError:
        raise UnsupportedError(
            f"expected the text of a kernel, got {path.name}, which is none",
            hint="pass a library that is built already as library=, with signature=",
        ) from None
