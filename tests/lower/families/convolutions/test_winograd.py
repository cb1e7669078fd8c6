"""Convolutions by windows of 3 × 3 in Winograd's way."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit import cpu_info
from fxkit.analysis.tensor_types import propagate_types
from fxkit.demo.judge import relative_error
from fxkit.lower import to_cpp
from fxkit.lower.autotuning import times as trial_times
from fxkit.lower.building.build import build
from fxkit.lower.building.toolchain import vector_library
from fxkit.lower.compiling import whole_operators
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.families.convolutions import autotune as convolution_trial
from fxkit.lower.families.convolutions.nodes import convolution_product
from fxkit.lower.library_calls import packed_convolution as packed
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import fully_parametrised
from tests.lower.families.convolutions.convolution_programs import (
    Program,
    as_it_is,
    built_for,
    exactly,
    hold_to_interpreter,
    innermost,
    kernel_of,
    lowered,
    numbered,
    rand,
)
from tests.sampling import Sample, one_in

CASES: dict[str, tuple[Program, tuple[int, ...]]] = {
    "plain": (Program((50, 24, 3, 3), padding=1), (1, 24, 8, 10)),
    "no padding": (Program((48, 40, 3, 3)), (1, 40, 9, 11)),
    "wide padding": (Program((16, 17, 3, 3), padding=3), (1, 17, 4, 5)),
    "uneven padding": (Program((32, 16, 3, 3), padding=(0, 2)), (1, 16, 7, 6)),
    "odd sizes": (Program((33, 19, 3, 3), padding=1), (1, 19, 13, 7)),
    "two columns": (Program((24, 16, 3, 3), padding=1), (1, 16, 9, 2)),
    "one row": (Program((24, 16, 3, 3)), (1, 16, 3, 9)),
    "long rows": (Program((16, 16, 3, 3), padding=1), (1, 16, 5, 256)),
    "several images": (Program((24, 16, 3, 3), padding=1), (5, 16, 6, 7)),
    "several tiles": (Program((100, 16, 3, 3), padding=1), (2, 16, 45, 40)),
    "many channels": (Program((48, 333, 3, 3), padding=1), (1, 333, 7, 7)),
    "many results": (Program((300, 20, 3, 3), padding=1), (1, 20, 9, 8)),
    "bias": (Program((24, 16, 3, 3), has_bias=True), (1, 16, 6, 7)),
    "norm": (Program((24, 16, 3, 3), has_bias=True, norm="mvsch"), (2, 16, 6, 7)),
    "relu6": (Program((24, 16, 3, 3), padding=1, norm="mvsch", then=F.relu6), (2, 16, 6, 7)),
}


@pytest.fixture(autouse=True)
def _in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute each convolution in a kernel, also where the library is faster."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: None)
    monkeypatch.setattr(whole_operators, "objection_by_kind", lambda *_: None)


def with_windows_last(program: Program) -> Program:
    """Return a program whose weight has its channels innermost."""
    made = Program(tuple(program.weight.shape), then=program.then)
    made.__dict__.update(program.__dict__ | {"_parameters": dict(program._parameters)})
    weight = program.weight.detach().contiguous(memory_format=torch.channels_last)
    made.weight = nn.Parameter(weight)
    return made


def turned(kernel: Kernel) -> Kernel:
    """Return a kernel with its convolution in Winograd's way."""
    first, *others = kernel.body
    assert first.detail.may_be_winograd
    detail = replace(first.detail, is_winograd=True)
    return replace(kernel, body=(replace(first, detail=detail), *others))


@pytest.mark.parametrize(("is_last", "name"), one_in(4, [False, True], CASES))
def test_convolutions(name: str, is_last: bool) -> None:
    program, shape = CASES[name]
    program = with_windows_last(program) if is_last else program
    (names,) = lowered(program, innermost(*shape))
    assert len(names) == (1 if program.then is as_it_is else 2)


def text_of(program: Program, x: torch.Tensor) -> str:
    with torch.no_grad():
        return to_cpp(fx.symbolic_trace(program), (x,)).source


def test_only_what_it_serves_is_computed_so() -> None:
    def is_turned(program: Program, *shape: int) -> bool:
        return "fx_winograd(geometry" in text_of(program, innermost(*shape))

    assert is_turned(Program((16, 16, 3, 3)), 1, 16, 8, 8)
    assert not is_turned(Program((16, 15, 3, 3)), 1, 15, 8, 8)
    assert not is_turned(Program((15, 16, 3, 3)), 1, 16, 8, 8)
    assert not is_turned(Program((16, 16, 3, 2)), 1, 16, 8, 8)
    assert not is_turned(Program((16, 16, 5, 5)), 1, 16, 8, 8)
    assert not is_turned(Program((16, 16, 3, 3), stride=2), 1, 16, 8, 8)
    assert not is_turned(Program((16, 16, 3, 3), dilation=2), 1, 16, 8, 8)
    assert not is_turned(Program((16, 1, 3, 3), groups=16), 1, 16, 8, 8)
    assert not is_turned(Program((16, 16, 3, 3), padding=1), 1, 16, 2, 257)
    assert not is_turned(Program((16, 16, 3, 3)), 1, 16, 8, 3)


@pytest.mark.parametrize("is_runtime", [False, True])
@torch.no_grad()
def test_text_and_interpreter_agree(is_runtime: bool, some: Sample) -> None:
    made = [
        kernel_of(as_it_lies(program), innermost(*shape))
        for program, shape in some(CASES.values(), -(-len(CASES) // 2))
        for as_it_lies in (as_it_is, with_windows_last)
    ]
    kernels = [turned(kernel) for kernel, _ in made]
    kernels = [fully_parametrised(kernel) for kernel in kernels] if is_runtime else kernels
    handle = build(print_unit(numbered(kernels), vector_library())).handle
    hold_to_interpreter(handle, kernels, made)


@pytest.mark.skipif(not cpu_info.features(), reason="features of the CPU unknown")
@pytest.mark.parametrize("march", ["haswell", "x86-64"])
@torch.no_grad()
def test_shorter_vectors_give_the_same(march: str, tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or "avx2" not in cpu_info.features():
        pytest.skip("the CPU has no AVX2")
    names = ("norm", "odd sizes", "several tiles", "many channels")
    made = [kernel_of(program, innermost(*shape)) for program, shape in map(CASES.get, names)]  # type: ignore[misc]
    kernels = [turned(kernel) for kernel, _ in made]
    hold_to_interpreter(built_for(march, kernels, tmp_path), kernels, made)


@pytest.mark.parametrize("kind", ["noise", "positive", "offset", "smooth", "one large"])
@torch.no_grad()
def test_errors_are_those_of_eager(kind: str) -> None:
    program = Program((64, 128, 3, 3), padding=1)
    x = rand(1, 128, 28, 28)
    if kind == "positive":
        x = x.relu()
    elif kind == "offset":
        x = x + 100
    elif kind == "smooth":
        x = F.interpolate(x[:, :, :5, :5], size=(28, 28), mode="bicubic")
    elif kind == "one large":
        x[0, 5, 14, 14] = 1e4
    exact, image = exactly(program, x.double()), x.contiguous(memory_format=torch.channels_last)
    found = to_cpp(fx.symbolic_trace(program), (image,))(image)
    eager = min(relative_error(exactly(program, of), exact) for of in (x, image))
    assert relative_error(found, exact) <= 1.6 * eager


@pytest.mark.parametrize("size", [8, 40])
@torch.no_grad()
def test_what_is_not_finite_stays_where_it_is(size: int, some: Sample) -> None:
    x = innermost(2, 24, size, size + 1)
    x[0, 3, 4, 4], x[0, 5, 7, 8], x[1, 7, 0, 0] = float("nan"), float("inf"), -float("inf")
    for then in some((F.relu6, F.silu, as_it_is), 2):
        program = Program((30, 24, 3, 3), padding=1, then=then)
        found, expected = to_cpp(fx.symbolic_trace(program), (x,))(x), exactly(program, x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@torch.no_grad()
def test_numbers_that_overflow_on_the_way_alone() -> None:
    """Differences of an image's largest numbers are beyond float32, their sums of products not."""
    x = innermost(1, 16, 8, 8).sign() * 3e38
    program = Program((16, 16, 3, 3), padding=1)
    program.weight.mul_(1e-4)
    found, expected = to_cpp(fx.symbolic_trace(program), (x,))(x), exactly(program, x)
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=float(expected.abs().max()) * 1e-6)


@torch.no_grad()
def test_nothing_outside_an_image_is_read() -> None:
    for shape in ((1, 17, 6, 7), (2, 24, 4, 4)):
        program = Program((20, shape[1], 3, 3), padding=1)
        memory = torch.full((3, *shape), float("nan"))
        image = memory[1].copy_(rand(*shape))
        image = image.as_strided(shape, innermost(*shape).stride())
        compiled = to_cpp(fx.symbolic_trace(program), (image,))
        torch.testing.assert_close(compiled(image), exactly(program, image), rtol=1e-4, atol=1e-4)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(24, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 24, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.second(torch.relu(self.first_norm(self.first(x)))))


@pytest.mark.skipif(not packed.is_available(), reason="torch without oneDNN")
@torch.no_grad()
def test_a_block_at_all_sizes_and_layouts() -> None:
    module = Block().eval()
    compiled = fxkit.compile(module)
    for size in ((1, 28, 28), (2, 28, 28), (2, 31, 9), (3, 28, 31)):
        x = rand(size[0], 24, *size[1:])
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
    for lowering_ in compiled.compiled_modules:
        kernels = [region.nodes for region in lowering_.regions if region.kernel]
        assert sum("convolution" in name for names in kernels for name in names) == 2
    module.first.weight.mul_(2)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


def test_the_trial_compares_with_the_library_and_the_plain_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gm = fx.symbolic_trace(Program((32, 16, 3, 3), padding=1))
    propagate_types(gm, (innermost(1, 16, 28, 28),))
    (node,) = (n for n in gm.graph.nodes if n.target is packed.operator())
    found = convolution_product(node, gm)
    detail = replace(found.product, is_winograd=True)  # type: ignore[arg-type]
    asked = []

    def fastest(*ways: Any) -> tuple[float, float]:
        asked.append(len(ways))
        for way in ways:
            way()
        return 1.0, 2.0

    monkeypatch.setattr(trial_times, "fastest", fastest)
    monkeypatch.setattr(trial_times, "_known_in", lambda path: {})
    monkeypatch.setattr(trial_times, "write_times", lambda *_: None)
    for product in (found.product, detail):
        assert convolution_trial.convolution_objection(replace(found, product=product)) is None
    assert asked == [2, 3]
