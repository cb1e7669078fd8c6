"""Find passes, rules and operators by the module they are defined in.

Nothing is registered by hand: a registry imports the modules of one package, in the order of their
names, and keeps what its `select` function picks out of each. Adding a thing is adding a file.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Generic, TypeVar

from fxkit.errors import FxkitError

T = TypeVar("T")


class Registry(Generic[T]):
    """The named things that the modules of a package define.

    Args:
        kind: What is registered, for messages: `"pass"`, `"rule"`.
        package: Dotted name of the package whose modules are searched.
        select: Yields the `(name, thing)` pairs that a module defines.
    """

    def __init__(
        self, kind: str, package: str, select: Callable[[ModuleType], Iterator[tuple[str, T]]]
    ) -> None:
        self.kind = kind
        self.package = package
        self._select = select
        self._found: dict[str, T] | None = None
        self._files: dict[str, str] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def __contains__(self, name: object) -> bool:
        return name in self._load()

    def __getitem__(self, name: str) -> T:
        found = self._load()
        if name not in found:
            raise FxkitError(
                f"expected the name of {_with_article(self.kind)}, got {name!r}",
                hint=f"the known ones are: {', '.join(sorted(found))}",
            )
        return found[name]

    def items(self) -> Iterator[tuple[str, T]]:
        """Iterate over `(name, thing)` in the order of modules, then of definition."""
        return iter(self._load().items())

    def file_of(self, name: str) -> str:
        """Return the path of the file that defines `name`."""
        self[name]
        return self._files[name]

    def add(self, name: str, thing: T, file: str) -> None:
        """Register one thing.

        Raises:
            FxkitError: When another file has registered the name; the message cites both.
        """
        if self._found is None:
            self._found = {}
        if name in self._found:
            raise FxkitError(
                f"expected one {self.kind} named {name!r}, got two: {self._files[name]} and {file}",
                hint="rename one of them",
            )
        self._found[name] = thing
        self._files[name] = file

    def _load(self) -> dict[str, T]:
        if self._found is None:
            self._found = {}
            for module in _modules(self.package):
                for name, thing in self._select(module):
                    self.add(name, thing, module.__file__ or module.__name__)
        return self._found


def defined_here(module: ModuleType, thing: object) -> bool:
    """Tell whether `thing` was defined in `module`, rather than imported into it."""
    return inspect.getmodule(thing) is module


def _modules(package: str) -> Iterator[ModuleType]:
    root = importlib.import_module(package)
    for info in sorted(pkgutil.iter_modules(root.__path__), key=lambda info: info.name):
        yield importlib.import_module(f"{package}.{info.name}")


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
