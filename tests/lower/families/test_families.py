"""Each family does what its folder says: its samples run in kernels, right, in each of its ways."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx

import fxkit
from fxkit.analysis.tensor_types import propagate_types
from fxkit.demo.judge import relative_error
from fxkit.lower.building import toolchain
from fxkit.lower.building.build import build
from fxkit.lower.building.toolchain import vector_library
from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.compiling import pack_convolutions, whole_operators
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.families import family
from fxkit.lower.families.family import FAMILIES, Sample, printer_of
from fxkit.lower.library_calls import packed_convolution as packed
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import fully_parametrised
from fxkit.lower.runtime.kernel_call import KernelCall
from tests.lower.families.convolutions.convolution_programs import call, numbered
from tests.sampling import Sample as Some

SAMPLES = {
    f"{family}, {name}": (family, name)
    for family, made in FAMILIES.items()
    for name in made.samples()
}


@pytest.fixture(autouse=True)
def _in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels compute whatever they can, also where torch's library is faster."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: None)
    monkeypatch.setattr(pack_convolutions, "FEWEST_DENSE", 1)


def sample_of(name: str) -> Sample:
    family, sample = SAMPLES[name]
    if family == "convolutions" and not packed.is_available():
        pytest.skip("torch without oneDNN")
    return FAMILIES[family].samples()[sample]


def test_each_folder_is_a_family() -> None:
    weights, floats = ["int4", "int8_weight"], ["attention", "convolutions"]
    integers = [f"integer_{kind}" for kind in (*floats, "products")]
    products = [f"{kind}_products" for kind in weights]
    assert list(FAMILIES) == [*floats, *products, *integers, "products"]
    ways = [way for _, family in FAMILIES.items() for way in family.printers]
    assert len(set(ways)) == len(ways)


@pytest.mark.parametrize("name", SAMPLES)
@torch.no_grad()
def test_samples_run_in_kernels(name: str) -> None:
    program, args = sample_of(name)
    tolerance = FAMILIES[SAMPLES[name][0]].tolerance
    compiled = fxkit.compile(program)
    found = compiled(*args)
    (module,) = compiled.compiled_modules
    assert any(kernel.tensor_op is not None for kernel in module.kernels.values())
    wide = copy.deepcopy(program).double() if isinstance(program, torch.nn.Module) else program
    exact = wide(*[arg.double() if arg.is_floating_point() else arg for arg in args])
    eager = max(relative_error(program(*args), exact), 2.0**-24)
    assert relative_error(found, exact) <= tolerance * eager


def ways_of(kernel: Kernel, has_unit: bool = matrix_unit.is_available()) -> Iterator[Kernel]:
    """Yield a kernel in each way that its family has for it, on this machine or on one like it."""
    yield kernel
    first, *others = kernel.body
    for switch, may_be in (
        ("is_winograd", getattr(first.detail, "may_be_winograd", False)),
        ("is_bf16x3", has_unit),
    ):
        if may_be and hasattr(first.detail, switch):
            turned = replace(first, detail=replace(first.detail, **{switch: True}))
            yield replace(kernel, body=(turned, *others))


def kernels_of(name: str) -> list[tuple[Kernel, KernelCall]]:
    program, args = sample_of(name)
    compiled = fxkit.compile(program)
    compiled(*args)
    (module,) = compiled.compiled_modules
    calls = [n.target for n in module.lowered.graph.nodes if isinstance(n.target, KernelCall)]
    return [(call.kernel, call) for call in calls if call.kernel.tensor_op is not None]


def empty(made: KernelCall) -> list[torch.Tensor]:
    """Return tensors of the types that a call of a kernel returns."""
    return [torch.empty_strided(o.shape, o.stride, dtype=o.dtype) for o in made.outputs]  # type: ignore[arg-type]


def filled(made: KernelCall) -> list[torch.Tensor]:
    """Return tensors of the types that a call of a kernel takes."""
    generator, tensors = torch.Generator().manual_seed(1), []
    for known in made.inputs:
        numbers = torch.randn(known.shape, generator=generator)
        tensor = torch.empty_strided(known.shape, known.stride, dtype=known.dtype)  # type: ignore[arg-type]
        tensors.append(tensor.copy_(numbers > 0 if known.dtype == torch.bool else numbers))
    return tensors


@pytest.mark.parametrize("is_runtime", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_each_text_computes_what_its_detail_says(family: str, is_runtime: bool, some: Some) -> None:
    every = [name for name, (of, _) in SAMPLES.items() if of == family]
    names = some(every, -(-len(every) // 3))
    calls = [(way, made) for name in names for kernel, made in kernels_of(name)
             for way in ways_of(kernel)]  # fmt: skip
    ways = [fully_parametrised(way) if is_runtime else way for way, _ in calls]
    handle = build(print_unit(numbered(ways), vector_library())).handle
    for number, (way, (_, made)) in enumerate(zip(ways, calls, strict=True)):
        inputs = filled(made)
        (expected,), (found,) = empty(made), empty(made)
        assert interpret(made.kernel, inputs, [expected])
        call(getattr(handle, f"k{number}"), way, [*inputs, found])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# One that has a unit for matrices: what is printed for it is looked at where there is none, too.
OTHER_PROCESSOR = "-march=sapphirerapids"


@torch.no_grad()
def test_the_texts_of_all_families_compile_together_for_another_processor() -> None:
    tools = toolchain.current()
    compiler = [tools.compiler, *tools.flags, OTHER_PROCESSOR, "-fsyntax-only", "-x", "c++", "-"]

    def errors_of(text: str) -> str:
        found = subprocess.run(compiler, input=text, capture_output=True, text=True, check=False)
        return found.stderr if found.returncode else ""

    if errors_of(""):
        pytest.skip(f"the compiler does not know {OTHER_PROCESSOR}")
    kernels = [kernel for name in SAMPLES for kernel, _ in kernels_of(name)]
    ways = [way for kernel in kernels for way in ways_of(kernel, has_unit=True)]
    assert not errors_of(print_unit(numbered(ways), vector_library()))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_samples_take_each_way_of_their_family(family: str) -> None:
    names = [name for name, (of, _) in SAMPLES.items() if of == family]
    kernels = [kernel for name in names for kernel, _ in kernels_of(name)]
    taken = {printer_of(way) for kernel in kernels for way in ways_of(kernel)}
    printers = FAMILIES[family].printers
    without_unit = set() if matrix_unit.is_available() else {printers.get("bf16x3_product")}
    assert taken | without_unit >= set(printers.values())


@pytest.mark.parametrize("name", SAMPLES)
def test_nodes_are_told_apart(name: str) -> None:
    program, args = sample_of(name)
    gm = fxkit.capture(program, args).graph_module
    assert sum(family.kernels_of(n) is not None for n in gm.graph.nodes) == (
        0 if name.startswith("convolutions") else 1
    )


def test_other_nodes_belong_to_none() -> None:
    gm = fx.symbolic_trace(lambda x: torch.softmax(x, -1) * 2)
    propagate_types(gm, (torch.ones(3, 4),))
    assert all(family.kernels_of(node) is None for node in gm.graph.nodes)
