"""Packed convolutions in kernels: of windows, single pixels, single channels; what follows them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxkit
from fxkit import cpu_info
from fxkit.analysis.tensor_types import propagate_types
from fxkit.lower import to_cpp
from fxkit.lower.autotuning import times as trial_times
from fxkit.lower.building.build import build
from fxkit.lower.building.toolchain import vector_library
from fxkit.lower.compiling import whole_operators
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.families.convolutions import autotune as convolution_trial
from fxkit.lower.families.convolutions.nodes import convolution_product
from fxkit.lower.families.product_node import ProductNode
from fxkit.lower.families.products.autotune import timed_beside
from fxkit.lower.library_calls import packed_convolution as packed
from fxkit.lower.loop_ir.product import Product
from fxkit.lower.loop_ir.runtime_parameters import fully_parametrised
from tests.lower.families.convolutions.convolution_programs import (
    Program,
    Residual,
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


@pytest.fixture(autouse=True)
def _in_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute each convolution in a plain kernel, also where another way is faster."""
    monkeypatch.setattr(whole_operators, "objection", _objection)
    monkeypatch.setattr(whole_operators, "objection_by_kind", _objection)


def _objection(kernels: object, found: ProductNode) -> str | None:
    is_plain = isinstance(found.product, Product) or not found.product.is_winograd
    return None if is_plain else "a plain kernel is tested"


PIXELS: dict[str, tuple[Program, tuple[int, ...]]] = {
    "plain": (Program((40, 24, 1, 1)), (1, 24, 7, 9)),
    "narrow": (Program((5, 33, 1, 1)), (1, 33, 12, 5)),
    "deep": (Program((48, 700, 1, 1)), (1, 700, 7, 7)),
    "several images": (Program((50, 24, 1, 1)), (3, 24, 5, 5)),
    "one pixel": (Program((50, 24, 1, 1)), (4, 24, 1, 1)),
    "one channel": (Program((50, 1, 1, 1)), (1, 1, 9, 8)),
    "bias": (Program((40, 24, 1, 1), has_bias=True), (1, 24, 7, 9)),
    "norm": (Program((40, 24, 1, 1), norm="mvsch"), (1, 24, 7, 9)),
    "bias and bare norm": (Program((40, 24, 1, 1), has_bias=True, norm="mv"), (2, 24, 7, 9)),
    "relu6": (Program((40, 24, 1, 1), norm="mvsch", then=F.relu6), (1, 24, 7, 9)),
    "silu": (Program((100, 24, 1, 1), has_bias=True, then=F.silu), (2, 24, 7, 9)),
}
DEPTHWISE: dict[str, tuple[Program, tuple[int, ...]]] = {
    "plain": (Program((48, 1, 3, 3), 48, padding=1), (1, 48, 9, 11)),
    "no padding": (Program((48, 1, 3, 3), 48), (1, 48, 9, 11)),
    "wide padding": (Program((16, 1, 3, 3), 16, padding=3), (1, 16, 4, 5)),
    "stride": (Program((32, 1, 3, 3), 32, stride=2, padding=1), (1, 32, 14, 13)),
    "other strides": (Program((32, 1, 3, 3), 32, (3, 2), (0, 2)), (1, 32, 14, 13)),
    "five": (Program((64, 1, 5, 5), 64, padding=2), (1, 64, 10, 12)),
    "five by stride": (Program((64, 1, 5, 5), 64, 2, 2), (1, 64, 13, 12)),
    "seven": (Program((40, 1, 7, 7), 40, padding=3), (2, 40, 15, 21)),
    "seven by stride": (Program((20, 1, 7, 7), 20, 3, 2, 2), (1, 20, 30, 41)),
    "half a vector": (Program((24, 1, 3, 3), 24, padding=1), (1, 24, 9, 19)),
    "narrow images": (Program((24, 1, 3, 3), 24, padding=1), (1, 24, 30, 3)),
    "one row": (Program((64, 1, 1, 5), 64, padding=(0, 2)), (1, 64, 6, 12)),
    "one column": (Program((64, 1, 4, 1), 64), (1, 64, 6, 12)),
    "one pixel": (Program((64, 1, 1, 1), 64, padding=1), (1, 64, 6, 3)),
    "dilation": (Program((16, 1, 3, 3), 16, 1, 2, 2), (1, 16, 9, 12)),
    "dilation and stride": (Program((16, 1, 3, 3), 16, 2, 3, 3), (2, 16, 20, 12)),
    "window beyond the image": (Program((16, 1, 5, 5), 16, padding=2), (1, 16, 2, 1)),
    "odd channels": (Program((53, 1, 3, 3), 53, padding=1), (1, 53, 6, 7)),
    "few channels": (Program((3, 1, 3, 3), 3, padding=1), (1, 3, 6, 7)),
    "many channels": (Program((200, 1, 3, 3), 200, padding=1), (1, 200, 6, 7)),
    "several images": (Program((24, 1, 3, 3), 24, padding=1), (5, 24, 6, 7)),
    "large": (Program((16, 1, 3, 3), 16, padding=1), (1, 16, 60, 70)),
    "bias": (Program((24, 1, 3, 3), 24, has_bias=True), (1, 24, 6, 7)),
    "norm": (Program((24, 1, 3, 3), 24, 1, 1, has_bias=True, norm="mvsch"), (2, 24, 6, 7)),
    "relu6": (Program((24, 1, 3, 3), 24, 1, 1, norm="mvsch", then=F.relu6), (2, 24, 6, 7)),
    "hardswish": (Program((96, 1, 5, 5), 96, 2, 2, norm="mv", then=F.hardswish), (1, 96, 9, 9)),
}
WINDOWS: dict[str, tuple[Program, tuple[int, ...]]] = {
    "plain": (Program((50, 24, 3, 3), padding=1), (1, 24, 9, 11)),
    "no padding": (Program((48, 40, 3, 3)), (1, 40, 9, 11)),
    "wide padding": (Program((16, 5, 3, 3), padding=3), (1, 5, 4, 5)),
    "stride": (Program((32, 16, 3, 3), stride=2, padding=1), (1, 16, 14, 13)),
    "other strides": (Program((32, 16, 3, 3), 1, (3, 2), (0, 2)), (1, 16, 14, 13)),
    "single pixels by stride": (Program((70, 300, 1, 1), stride=2), (1, 300, 7, 8)),
    "padded single pixels": (Program((7, 30, 1, 1), padding=1), (1, 30, 7, 8)),
    "stem": (Program((40, 3, 7, 7), stride=2, padding=3), (2, 3, 30, 29)),
    "five": (Program((33, 20, 5, 5), padding=2), (1, 20, 10, 12)),
    "one row": (Program((20, 24, 1, 7), padding=(0, 3)), (1, 24, 6, 12)),
    "one column": (Program((20, 24, 4, 1)), (1, 24, 6, 12)),
    "a long row": (Program((20, 5, 1, 32), padding=(0, 16)), (2, 5, 3, 40)),
    "a long column": (Program((20, 5, 32, 2), padding=(16, 0)), (1, 5, 40, 3)),
    "dilation": (Program((16, 24, 3, 3), 1, 1, 2, 2), (1, 24, 9, 12)),
    "window beyond the image": (Program((16, 8, 5, 5), padding=2), (1, 8, 2, 1)),
    "several images": (Program((24, 10, 3, 3), padding=1), (5, 10, 6, 7)),
    "large": (Program((100, 16, 3, 3), padding=1), (1, 16, 30, 40)),
    "many channels": (Program((48, 333, 3, 3), padding=1), (1, 333, 7, 7)),
    "one channel": (Program((10, 1, 3, 3), padding=1), (1, 1, 7, 7)),
    "bias": (Program((24, 16, 3, 3), has_bias=True), (1, 16, 6, 7)),
    "norm": (Program((24, 16, 3, 3), has_bias=True, norm="mvsch"), (2, 16, 6, 7)),
    "relu6": (Program((24, 16, 3, 3), padding=1, norm="mvsch", then=F.relu6), (2, 16, 6, 7)),
}
ALL = {**{f"windows, {n}": c for n, c in WINDOWS.items()},
       **{f"pixels, {n}": c for n, c in PIXELS.items()},
       **{f"depthwise, {n}": c for n, c in DEPTHWISE.items()}}  # fmt: skip


@pytest.mark.parametrize("name", one_in(4, ALL))
def test_convolutions(name: str) -> None:
    program, shape = ALL[name]
    (names,) = lowered(program, innermost(*shape))
    assert len(names) == (1 if program.then is as_it_is else 2)


@pytest.mark.parametrize("is_runtime", [False, True])
@torch.no_grad()
def test_text_and_interpreter_agree(is_runtime: bool, some: Sample) -> None:
    names = [name for name in ALL if "silu" not in name]
    cases = [ALL[name] for name in some(names, -(-len(names) // 2))]
    made = [kernel_of(program, innermost(*shape)) for program, shape in cases]
    kernels = [fully_parametrised(kernel) if is_runtime else kernel for kernel, _ in made]
    handle = build(print_unit(numbered(kernels), vector_library())).handle
    hold_to_interpreter(handle, kernels, made)


@pytest.mark.skipif(not cpu_info.features(), reason="features of the CPU unknown")
@pytest.mark.parametrize("march", ["haswell", "x86-64"])
@torch.no_grad()
def test_shorter_vectors_give_the_same(march: str, tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or "avx2" not in cpu_info.features():
        pytest.skip("the CPU has no AVX2")
    names = ("windows, norm", "windows, stem", "depthwise, odd channels", "pixels, narrow")
    cases = [ALL[name] for name in names]
    made = [kernel_of(program, innermost(*shape)) for program, shape in cases]
    kernels = [kernel for kernel, _ in made]
    hold_to_interpreter(built_for(march, kernels, tmp_path), kernels, made)


@torch.no_grad()
def test_nothing_outside_an_image_is_read() -> None:
    for shape in ((1, 53, 6, 7), (1, 5, 3, 3), (2, 18, 4, 4)):
        channels = shape[1]
        program = Program((channels, 1, 3, 3), channels, padding=1)
        memory = torch.full((8, *shape), float("nan"))
        image = memory[3].copy_(rand(*shape))
        image = image.as_strided(shape, innermost(*shape).stride())
        compiled = to_cpp(fx.symbolic_trace(program), (image,))
        found = compiled(image)
        assert compiled.report().calls == 1
        torch.testing.assert_close(found, exactly(program, image), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_nan_and_inf_stay_where_they_are() -> None:
    x = innermost(1, 24, 8, 9)
    x[0, 3, 4, 4], x[0, 5, 7, 8], x[0, 7, 0, 0] = float("nan"), float("inf"), -float("inf")
    shapes = (((24, 1, 3, 3), 24, 1), ((30, 24, 1, 1), 1, 0), ((30, 24, 3, 3), 1, 1))
    for shape, groups, padding in shapes:
        for then in (F.relu6, F.silu, as_it_is):
            program = Program(shape, groups, padding=padding, then=then)
            found, expected = to_cpp(fx.symbolic_trace(program), (x,))(x), exactly(program, x)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found.isposinf(), expected.isposinf())


def test_a_residual_and_two_readers() -> None:
    x, y = innermost(2, 24, 6, 7), innermost(2, 24, 6, 7)
    program = Residual((24, 1, 3, 3), 24, padding=1, then=lambda v, w: torch.relu(v + w))
    (names,) = lowered(program, x, y)
    assert len(names) == 3
    program = Program((24, 24, 1, 1), then=lambda v: v * torch.sigmoid(v))
    (names,) = lowered(program, x)
    assert len(names) == 3
    program = Program((24, 24, 1, 1), then=lambda v: v + v.mean((2, 3), keepdim=True))
    assert sum(map(len, lowered(program, x))) == 3


@torch.no_grad()
def test_what_no_kernel_computes_says_why() -> None:
    for program, shape, reason in (
        (Program((24, 2, 3, 3), 12), (1, 24, 6, 7), "groups of channels"),
        (Program((24, 1, 8, 8), 24), (1, 24, 9, 9), "its window is large"),
        (Program((6, 5, 13, 13)), (1, 5, 20, 20), "its window is large"),
        (Program((20, 5, 1, 33), padding=(0, 16)), (1, 5, 3, 40), "its window is large"),
        (Program((20, 5, 100, 1), padding=(50, 0)), (1, 5, 60, 3), "its window is large"),
    ):
        x = innermost(*shape)
        compiled = to_cpp(fx.symbolic_trace(program), (x,))
        assert any(reason in (region.reason or "") for region in compiled.regions)
        torch.testing.assert_close(compiled(x), exactly(program, x), rtol=1e-4, atol=1e-4)


class Mobile(nn.Module):
    """A block of a network for small machines."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.widened = nn.Conv2d(24, 96, 1, bias=False), nn.BatchNorm2d(96)
        self.depth = nn.Conv2d(96, 96, 3, padding=1, groups=96, bias=False)
        self.depth_norm = nn.BatchNorm2d(96)
        self.narrow, self.narrowed = nn.Conv2d(96, 24, 1, bias=False), nn.BatchNorm2d(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu6(self.widened(self.widen(x)))
        inner = F.relu6(self.depth_norm(self.depth(inner)))
        return x + self.narrowed(self.narrow(inner))


@pytest.mark.skipif(not packed.is_available(), reason="torch without oneDNN")
@torch.no_grad()
def test_a_block_runs_in_three_kernels_at_all_sizes() -> None:
    module = Mobile().eval()
    compiled = fxkit.compile(module)
    for batch, size in ((1, 28), (2, 28), (2, 31), (3, 28)):
        x = rand(batch, 24, size, size)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)
    whole = [[r.nodes for r in m.regions if r.kernel] for m in compiled.compiled_modules]
    assert all(sum("convolution" in n for r in names for n in r) == 3 for names in whole)
    module.depth.weight.mul_(2)
    module.widened.running_var.add_(1)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


def test_the_trial_compares_with_the_packed_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    x = innermost(1, 64, 28, 28)
    gm = fx.symbolic_trace(Program((64, 64, 1, 1)))
    propagate_types(gm, (x,))
    (node,) = (n for n in gm.graph.nodes if n.target is packed.operator())
    found = convolution_product(node, gm)
    times = timed_beside(found.product, lambda: None)  # type: ignore[arg-type]
    assert 0 < times[1] < times[0]
    monkeypatch.setattr(convolution_trial, "_measured", lambda *_: (2.0, 1.0))
    monkeypatch.setattr(trial_times, "_known_in", lambda path: {})
    monkeypatch.setattr(trial_times, "write_times", lambda *_: None)
    reason = convolution_trial.convolution_objection(found)
    assert "convolves [1, 64, 1, 784] by [1, 1] to 64 channels" in str(reason)
    assert convolution_trial.convolution_objection_by_kind(found) is not None
    monkeypatch.setattr(convolution_trial, "_measured", lambda *_: (1.0, 2.0))
    assert convolution_trial.convolution_objection(found) is None
