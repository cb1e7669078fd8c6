"""Building the kernels of a graph: two translation units at once, one by one where that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fxkit.errors import BuildError
from fxkit.lower.autotuning.non_temporal_threshold import allow_streams
from fxkit.lower.building.build import Library, build
from fxkit.lower.building.toolchain import vector_library
from fxkit.lower.codegen.cpp.calling_convention import print_packed
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime import binding

if TYPE_CHECKING:
    from fxkit.lower.compiling.plan import Plan

# A second unit costs what a compiler takes to start; it pays from this many instructions on.
_TWO_UNITS = 150


@dataclass
class BuiltKernels:
    """Built kernels.

    Attributes:
        source: The C++ text of all kernels.
        libraries: Name of a kernel → the library that holds it.
        failures: Name of a kernel → why it could not be printed or built.
        functions: Name of a kernel → that of its function, where it is another one.
        parameters: Name of a kernel → what its function reads at run time, if anything.
    """

    source: str = ""
    libraries: dict[str, Library] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, bytes] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds to build, or to find, and load the kernels."""
        return sum({it.path: it.seconds for it in self.libraries.values()}.values())

    @property
    def cache_hit(self) -> bool:
        """Whether the kernels were there already."""
        return bool(self.libraries) and all(it.cache_hit for it in self.libraries.values())

    @property
    def general_failure(self) -> BuildError | None:
        """Why no kernel at all can be built, such as that there is no compiler; or None."""
        errors = (e for e in self.failures.values() if isinstance(e, BuildError))
        return next((error for error in errors if not error.is_of_text), None)

    def bind(self, plan: Plan, reasons: Mapping[str, str]) -> None:
        """Give each call of a plan its function; those without one compute with eager.

        Args:
            plan: The plan.
            reasons: Name of a kernel that is not there → why.
        """
        for region, name in plan.kernel_of.items():
            if name in self.libraries:
                parameters = [self.parameters[name]] if self.parameters.get(name) else []
                function = self.functions.get(name, name)
                plan.calls[region].bind(self.libraries[name].handle, function, *parameters)
        plan.regions[:] = [
            replace(region, kernel=None, reason=reasons[region.kernel], bytes_saved=None)
            if region.kernel is not None and region.kernel in reasons
            else region
            for region in plan.regions
        ]


def build_kernels(kernels: Mapping[str, Kernel]) -> BuiltKernels:
    """Build kernels, and begin to build the binding that calls them."""
    if not kernels:
        return BuiltKernels()
    binding.start()
    return build_together(kernels, _built)


def build_together(
    kernels: Mapping[str, Kernel],
    build_library: Callable[[Mapping[str, Kernel]], tuple[Library, str]],
) -> BuiltKernels:
    """Build kernels into one library; where that fails, each alone, to lose only those at fault.

    Args:
        kernels: Name → kernel.
        build_library: Prints and builds some of them; returns the library and its text.
    """
    try:
        library, source = build_library(kernels)
    except Exception as error:
        is_general = isinstance(error, BuildError) and not error.is_of_text
        if is_general or len(kernels) == 1:
            return BuiltKernels(failures=dict.fromkeys(kernels, error))
    else:
        return BuiltKernels(source, dict.fromkeys(kernels, library))
    built, sources = BuiltKernels(), list[str]()
    for name, kernel in kernels.items():
        try:
            built.libraries[name], source = build_library({name: kernel})
        except Exception as error:
            built.failures[name] = error
        else:
            sources.append(source)
    built.source = "\n".join(sources)
    return built


def _built(kernels: Mapping[str, Kernel]) -> tuple[Library, str]:
    texts = [_text(unit) for unit in _units(kernels)]
    library, source = build(*texts), "\n".join(texts)
    allow_streams(library.handle, source)
    return library, source


def _units(kernels: Mapping[str, Kernel]) -> list[dict[str, Kernel]]:
    """Divide kernels into one unit, or two of like size."""
    sizes = {name: len(kernel.body) for name, kernel in kernels.items()}
    if len(kernels) < 2 or sum(sizes.values()) < _TWO_UNITS:
        return [dict(kernels)]
    units: tuple[dict[str, Kernel], ...] = ({}, {})
    totals = [0, 0]
    for name in sorted(kernels, key=lambda n: -sizes[n]):
        smaller = totals.index(min(totals))
        units[smaller][name] = kernels[name]
        totals[smaller] += sizes[name]
    return [{name: unit[name] for name in kernels if name in unit} for unit in units]


def _text(kernels: Mapping[str, Kernel]) -> str:
    return f"{print_unit(kernels, vector_library())}\n{print_packed(kernels)}"
