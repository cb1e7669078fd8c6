"""The text of a user's kernel: where it lies, what it includes, and the library made of it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from fxkit.errors import UnsupportedError
from fxkit.lower.building import cuda_toolchain, toolchain
from fxkit.lower.building.build import library_path
from fxkit.lower.building.toolchain import Linking, Toolchain

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A C++ or CUDA text.

    Attributes:
        text: The text.
        path: The file that it was read from, or None.
        is_cuda: Whether nvcc compiles it.
        flags: More flags for the compiler.
    """

    text: str
    path: Path | None
    is_cuda: bool = False
    flags: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """What messages call it."""
        return "the text" if self.path is None else self.path.name

    @property
    def tools(self) -> Toolchain:
        """What it is built with; raises `BuildError` where there is none."""
        return cuda_toolchain.current() if self.is_cuda else toolchain.current()

    @property
    def key(self) -> str:
        """A text that differs where the kernel does."""
        return "\0".join((self.text, *self.flags, self._included()))

    def build(self, wrapper: str) -> tuple[Path, bool]:
        """Return the library of the text and of the functions that call it; it is not loaded.

        Returns:
            Where it lies, and whether it was there already.

        Raises:
            BuildError: With the first error, at the file and line of the user's own.
        """
        shown = str(self.path).replace("\\", "\\\\") if self.path else "kernel"
        text = f'#line 1 "{shown}"\n{self.text}\n#line 1 "call"\n{wrapper}'
        tools = self.tools
        folder = () if self.path is None else (str(self.path.parent),)
        linking = Linking(
            includes=folder, flags=(*tools.flags, *self.flags), identity=self._included()
        )
        return library_path(text, tools=tools, linking=linking)

    def _included(self) -> str:
        """Return a digest of the headers beside the file that it includes, or "" for none."""
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
            f"expected a file or the text of a kernel, got {given!s}, and there is no {path}",
            hint="paths begin at the file that calls fxkit.kernel",
        )
    return KernelSource(path.read_text(), path.resolve(), is_cuda, flags)
