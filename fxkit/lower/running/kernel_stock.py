"""Kernels that serve several sets of sizes: built once, and called with other numbers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fxkit.errors import BuildError
from fxkit.lower.cpp.build import Library
from fxkit.lower.cpp.free_numbers import freed, packed_numbers, parted
from fxkit.lower.cpp.printer import print_kernel
from fxkit.lower.loops.loop_ir import Kernel
from fxkit.lower.running.building import Built, build_kernels


@dataclass
class _Form:
    """What kernels that differ in their numbers alone have in common.

    Attributes:
        numbers: Those of the first kernel.
        free: Positions of the numbers that were others in a later one.
    """

    numbers: tuple[int, ...]
    free: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Function:
    library: Library
    name: str
    source: str


class KernelStock:
    """The kernels that a program was compiled to so far, for use at other sizes.

    A number stays in the text of a kernel until another size needs another one. Then it becomes one
    that is read at run time, and so it stays; sizes that never change stay known to the compiler. A
    function is called in place of another one when their texts are the same.
    """

    def __init__(self) -> None:
        self._builds = 0
        self._parts: dict[str, KernelStock] = {}
        self._forms: dict[Hashable, _Form] = {}
        self._functions: dict[str, _Function | BuildError] = {}
        self._lock = threading.Lock()

    @property
    def builds(self) -> int:
        """How often there was something to build that was not in stock."""
        return self._builds + sum(part.builds for part in self._parts.values())

    def part(self, name: str) -> KernelStock:
        """Return the stock of a part of the program, whose kernels are not like those of others."""
        with self._lock:
            return self._parts.setdefault(name, KernelStock())

    def note(self, kernels: Mapping[str, Kernel]) -> None:
        """Note the numbers of kernels that were built elsewhere, with all numbers in their texts.

        Those numbers that later kernels do not share with them are free from the start.
        """
        with self._lock:
            for _ in self._forms_of(kernels.values()):
                pass

    def build(self, kernels: Mapping[str, Kernel]) -> Built:
        """Return kernels, built where none in stock can be called in their place.

        Args:
            kernels: Name → kernel, of one graph.
        """
        with self._lock:
            open_ = self._freed(kernels)
            texts = {name: print_kernel(kernel, "kernel") for name, kernel in open_.items()}
            fresh = self._add(open_, texts)
            return self._take(open_, texts, fresh)

    def _freed(self, kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
        """Free the numbers of kernels that differ from those of earlier ones like them."""
        result: dict[str, Kernel] = {}
        forms = self._forms_of(kernels.values())
        for (name, kernel), (form, numbers) in zip(kernels.items(), forms, strict=True):
            pairs = enumerate(zip(form.numbers, numbers, strict=True))
            form.free |= {position for position, (ours, other) in pairs if ours != other}
            result[name] = freed(kernel, form.free)
        return result

    def _forms_of(self, kernels: Iterable[Kernel]) -> Iterator[tuple[_Form, tuple[int, ...]]]:
        """Yield, for each kernel of a graph, its form and its numbers.

        Of kernels of one form in one graph, the first is held to be the first at other sizes too.
        """
        seen: Counter[Hashable] = Counter()
        for kernel in kernels:
            rest, numbers = parted(kernel)
            yield self._forms.setdefault((rest, seen[rest]), _Form(numbers)), numbers
            seen[rest] += 1

    def _add(self, kernels: Mapping[str, Kernel], texts: Mapping[str, str]) -> set[str]:
        """Build the kernels that are not in stock; return their texts."""
        missing: dict[str, str] = {}
        for name, text in texts.items():
            if text not in self._functions:
                missing.setdefault(text, name)
        if not missing:
            return set()
        self._builds += 1
        built = build_kernels({name: kernels[name] for name in missing.values()})
        for text, name in missing.items():
            library = built.libraries.get(name)
            self._functions[text] = (
                built.failures[name] if library is None else _Function(library, name, built.source)
            )
        return set(missing)

    def _take(
        self, kernels: Mapping[str, Kernel], texts: Mapping[str, str], fresh: set[str]
    ) -> Built:
        built = Built()
        sources: dict[str, None] = {}
        for name, kernel in kernels.items():
            function = self._functions[texts[name]]
            if isinstance(function, BuildError):
                built.failures[name] = function
                continue
            library = function.library
            if texts[name] not in fresh:
                library = replace(library, seconds=0.0, cache_hit=True)
            built.libraries[name] = library
            built.functions[name] = function.name
            built.numbers[name] = packed_numbers(kernel)
            sources[function.source] = None
        built.source = "\n".join(sources)
        return built
