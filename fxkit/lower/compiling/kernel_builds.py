"""Building the kernels of a graph: two translation units at once, one by one where one fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fxkit.errors import BuildError
from fxkit.lower.autotuning.non_temporal_threshold import allow_streams
from fxkit.lower.building.build import Library, build
from fxkit.lower.building.toolchain import vector_library
from fxkit.lower.codegen.cpp.calling_convention import print_packed
from fxkit.lower.compiling.plan import Plan
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime import binding

# A second unit costs what a compiler takes to start; it pays from this many instructions on.
_TWO_UNITS = 150


@dataclass
class BuiltKernels:
    """Built kernels.

    Attributes:
        source: The C++ text of all kernels.
        libraries: Name of a kernel → the library that holds it.
        failures: Name of a kernel → why it could not be built.
        functions: Name of a kernel → that of its function, where it is another one.
        numbers: Name of a kernel → what its function reads at run time, if anything.
    """

    source: str = ""
    libraries: dict[str, Library] = field(default_factory=dict)
    failures: dict[str, BuildError] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, bytes] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds to build, or to find, and load the kernels."""
        return sum({it.path: it.seconds for it in self.libraries.values()}.values())

    @property
    def cache_hit(self) -> bool:
        """Whether the kernels were there already."""
        return bool(self.libraries) and all(it.cache_hit for it in self.libraries.values())

    def bind(self, plan: Plan) -> None:
        """Give each call of a plan its function; those without one compute with eager."""
        for region, name in plan.kernel_of.items():
            if name in self.libraries:
                numbers = [self.numbers[name]] if self.numbers.get(name) else []
                function = self.functions.get(name, name)
                plan.calls[region].bind(self.libraries[name].handle, function, *numbers)
        plan.regions[:] = [
            replace(region, kernel=None, reason=self.failures[region.kernel].message,
                    bytes_saved=None)
            if region.kernel in self.failures else region
            for region in plan.regions
        ]  # fmt: skip


def build_kernels(kernels: Mapping[str, Kernel]) -> BuiltKernels:
    """Build kernels, and begin to build the binding that calls them."""
    if not kernels:
        return BuiltKernels()
    binding.start()
    texts = [_text(unit) for unit in _units(kernels)]
    built = BuiltKernels("\n".join(texts))
    try:
        library = build(*texts)
    except BuildError as error:
        return _one_by_one(kernels, built, error)
    allow_streams(library.handle, built.source)
    built.libraries.update(dict.fromkeys(kernels, library))
    return built


def _one_by_one(
    kernels: Mapping[str, Kernel], built: BuiltKernels, error: BuildError
) -> BuiltKernels:
    """Build each kernel alone, to lose those only which the compiler refuses."""
    if error.log is None or len(kernels) == 1:
        built.failures.update(dict.fromkeys(kernels, error))
        return built
    for name, kernel in kernels.items():
        try:
            text = _text({name: kernel})
            built.libraries[name] = build(text)
            allow_streams(built.libraries[name].handle, text)
        except BuildError as refused:
            built.failures[name] = refused
    return built


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
