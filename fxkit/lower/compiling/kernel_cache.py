"""The kernel cache of dynamic shapes: built once, called with other sizes as parameters."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

import torch

from fxkit.lower.building.build import Library
from fxkit.lower.compiling.kernel_builds import BuiltKernels, build_kernels
from fxkit.lower.compiling.varying_sizes import VaryingSizes
from fxkit.lower.cpp_printer import print_kernel
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import (
    packed_parameters,
    parametrised,
    split_parameters,
)

# So short rows take several times as long where their length is not known to the compiler; with so
# many points that is worth a build for each length.
SHORT_ROW = 32
MANY_POINTS = 1 << 18


@dataclass
class _Form:
    """What kernels that differ in their parameters alone have in common.

    Attributes:
        parameters: Those of the first kernel.
        free: Positions of the parameters that were others in a later one, or are held to vary.
    """

    parameters: tuple[int, ...]
    free: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Function:
    library: Library
    name: str
    source: str


class KernelCache:
    """The kernels that a program was compiled to so far, for use at other sizes.

    A number stays in the text of a kernel until another size needs another one. Then it becomes one
    that is read at run time, and so it stays; sizes that never change stay known to the compiler. A
    function is called in place of another one when their texts are the same.

    Args:
        sizes: Those of the program's inputs; its own where there are none.
    """

    def __init__(self, sizes: VaryingSizes | None = None) -> None:
        self._sizes = sizes or VaryingSizes()
        self._builds = 0
        self._parts: dict[str, KernelCache] = {}
        self._forms: dict[Hashable, _Form] = {}
        self._functions: dict[str, _Function | Exception] = {}
        self._first_others: Callable[[], Mapping[str, Kernel]] = dict
        self._lock = threading.Lock()

    @property
    def builds(self) -> int:
        """How often there was something to build that was not in the cache."""
        return self._builds + sum(part.builds for part in self._parts.values())

    def part(self, name: str) -> KernelCache:
        """Return the cache for a part of the program, whose kernels are unlike those of others."""
        with self._lock:
            return self._parts.setdefault(name, KernelCache(self._sizes))

    def see(self, args: tuple[torch.Tensor, ...]) -> None:
        """Note the inputs that the next kernels are for."""
        with self._lock:
            self._sizes.see(args)

    def note(self, kernels: Mapping[str, Kernel]) -> None:
        """Note the parameters of kernels built elsewhere, with all of them in their texts.

        Those parameters that later kernels do not share with them are free from the start.
        """
        with self._lock:
            self._note(kernels)

    def _note(self, kernels: Mapping[str, Kernel]) -> None:
        for _, form, parameters in self._forms_of(kernels):
            if form not in self._forms:
                self._forms[form] = _Form(parameters)

    def build(
        self,
        kernels: Mapping[str, Kernel],
        others: Callable[[], Mapping[str, Kernel]] = dict,
    ) -> BuiltKernels:
        """Return kernels, built where none in the cache can be called in their place.

        Args:
            kernels: Name → kernel, of one graph.
            others: Makes those that further sizes may ask for; once sizes are known to vary, they
                are built with the first of these that have to be built.
        """
        with self._lock:
            open_ = self._freed(kernels)
            texts, unprinted = _texts(open_)
            fresh = {text for text in texts.values() if text not in self._functions}
            if fresh:
                self._builds += 1
                self._add(open_, texts)
                if self._sizes.vary:
                    self._note(self._first_others())
                    ahead = self._freed(others())
                    self._add(ahead, _texts(ahead)[0])
                else:
                    self._first_others = others
            built = self._take({name: open_[name] for name in texts}, texts, fresh)
            built.failures.update(unprinted)
            return built

    def _freed(self, kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
        """Let parameters vary in kernels that differ from those of earlier ones like them.

        In a kernel like none before, those are free that are the sizes of inputs which vary, or
        are free in other kernels.
        """
        varying = self._sizes.numbers()
        found = self._forms_of(kernels)
        for _, key, parameters in found:
            if (form := self._forms.get(key)) is not None:
                pairs = enumerate(zip(form.parameters, parameters, strict=True))
                form.free |= {position for position, (ours, other) in pairs if ours != other}
                varying |= {parameters[position] for position in form.free}
        for _, key, parameters in found:
            if key not in self._forms:
                free = {position for position, n in enumerate(parameters) if n in varying}
                self._forms[key] = _Form(parameters, frozenset(free))
        return {
            name: parametrised(
                kernels[name], self._forms[key].free - _lengths(kernels[name], parameters)
            )
            for name, key, parameters in found
        }

    def _forms_of(
        self, kernels: Mapping[str, Kernel]
    ) -> list[tuple[str, Hashable, tuple[int, ...]]]:
        """Return, for each kernel of a graph, its name, its form and its parameters.

        Of kernels of one form in one graph, the first is held to be the first at other sizes too.
        """
        seen: Counter[Hashable] = Counter()
        found: list[tuple[str, Hashable, tuple[int, ...]]] = []
        for name, kernel in kernels.items():
            rest, parameters = split_parameters(kernel)
            found.append((name, (rest, seen[rest]), parameters))
            seen[rest] += 1
        return found

    def _add(self, kernels: Mapping[str, Kernel], texts: Mapping[str, str]) -> None:
        """Build the kernels that are not in the cache."""
        missing: dict[str, str] = {}
        for name, text in texts.items():
            if text not in self._functions:
                missing.setdefault(text, name)
        if not missing:
            return
        built = build_kernels({name: kernels[name] for name in missing.values()})
        for text, name in missing.items():
            library = built.libraries.get(name)
            self._functions[text] = (
                built.failures[name] if library is None else _Function(library, name, built.source)
            )

    def _take(
        self, kernels: Mapping[str, Kernel], texts: Mapping[str, str], fresh: set[str]
    ) -> BuiltKernels:
        built = BuiltKernels()
        sources: dict[str, None] = {}
        for name, kernel in kernels.items():
            function = self._functions[texts[name]]
            if isinstance(function, Exception):
                built.failures[name] = function
                continue
            library = function.library
            if texts[name] not in fresh:
                library = replace(library, seconds=0.0, cache_hit=True)
            built.libraries[name] = library
            built.functions[name] = function.name
            built.parameters[name] = packed_parameters(kernel)
            sources[function.source] = None
        built.source = "\n".join(sources)
        return built


def _lengths(kernel: Kernel, parameters: tuple[int, ...]) -> frozenset[int]:
    """Return the positions of parameters that stay in the text: the length of many short rows."""
    length = kernel.sizes[-1] if kernel.sizes else 0
    if not 0 < length < SHORT_ROW or kernel.points < MANY_POINTS:
        return frozenset()
    return frozenset(position for position, number in enumerate(parameters) if number == length)


def _texts(kernels: Mapping[str, Kernel]) -> tuple[dict[str, str], dict[str, Exception]]:
    """Return the text of each kernel, and what was raised where there is none."""
    texts: dict[str, str] = {}
    unprinted: dict[str, Exception] = {}
    for name, kernel in kernels.items():
        try:
            texts[name] = print_kernel(kernel, "kernel")
        except Exception as error:
            unprinted[name] = error
    return texts, unprinted
