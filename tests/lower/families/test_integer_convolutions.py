"""Convolutions of 8-bit integers: exact for all sizes and numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import fxkit
from fxkit.lower.compiling import whole_operators
from fxkit.lower.families.integer_convolutions import printer
from fxkit.lower.families.integer_convolutions.custom_op import integer_convolution, operator
from tests.sampling import examples


@pytest.fixture(autouse=True)
def in_kernels(monkeypatch):
    """Let kernels compute each convolution, also where that is slower."""
    monkeypatch.setattr(whole_operators, "objection", lambda *_: None)


def exact(images: Tensor, weight: Tensor, zero: int, sides, stride, padding, dilation) -> Tensor:
    """Convolve in int64: windows are multiplied and added up one by one."""
    down, right = padding
    wide = F.pad(images.long() - zero, (right, right, down, down))
    height, width = sides
    total = torch.zeros(images.shape[0], weight.shape[0], height, width, dtype=torch.int64)
    for h in range(weight.shape[2]):
        for w in range(weight.shape[3]):
            y, x = h * dilation[0], w * dilation[1]
            part = wide[:, :, y : y + (height - 1) * stride[0] + 1 : stride[0]]
            part = part[..., x : x + (width - 1) * stride[1] + 1 : stride[1]]
            factors = weight[:, :, h, w].long()
            if factors.shape[1] < images.shape[1]:
                total += part * factors[:, 0, None, None]
            else:
                total += torch.einsum("bchw,nc->bnhw", part, factors)
    return total


def integers(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
    limits = torch.iinfo(dtype)
    if kind == "random":
        drawn = torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)
    else:
        drawn = torch.full(shape, limits.min if kind == "least" else limits.max, dtype=dtype)
    return drawn.contiguous(memory_format=torch.channels_last)


def convolve(images: Tensor, weight: Tensor, zero: int, stride, padding, dilation) -> Tensor:
    """Convolve as lowered graphs do."""
    groups = images.shape[1] // weight.shape[1]
    return operator()(images, weight, zero, stride, padding, dilation, groups)


KINDS = st.sampled_from(["random", "random", "least", "largest"])
PAIRS = st.tuples(*[st.sampled_from([1, 1, 2, 3])] * 2)


@examples(6, of=30)
@given(
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([1, 2, 3, 5, 16, 31, 64, 65]),
    st.sampled_from([1, 3, 16, 63, 64, 65, 130]),
    st.tuples(st.integers(1, 23), st.one_of(st.just(1), st.integers(1, 23))),
    st.tuples(st.sampled_from([1, 2, 3, 5, 7]), st.sampled_from([1, 2, 3, 5, 7])),
    st.tuples(PAIRS, st.tuples(st.integers(0, 4), st.integers(0, 4)), PAIRS),
    st.sampled_from([torch.int8, torch.uint8]),
    st.tuples(KINDS, KINDS),
    st.sampled_from([0, 3, 100, "low", "high"]),
    st.booleans(),
)
def test_sums_are_exact(
    count, channels, out, image, window, moves, dtype, kinds, zero, is_depthwise
):
    stride, padding, dilation = moves
    sides = tuple(
        (image[i] + 2 * padding[i] - dilation[i] * (window[i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    )
    assume(min(sides) > 0)
    limits = torch.iinfo(dtype)
    zero = {"low": limits.min, "high": limits.max}.get(zero, zero)
    images = integers((count, channels, *image), dtype, kinds[0])
    weight = integers((out, channels, *window), torch.int8, kinds[1])
    if is_depthwise and channels > 1:
        weight = integers((channels, 1, *window), torch.int8, kinds[1])

    def program(images, weight):
        return convolve(images, weight, zero, stride, padding, dilation)

    compiled = fxkit.compile(program)
    compiled(images, weight)  # the first call runs the program itself
    found = compiled(images, weight)
    expected = exact(images, weight, zero, sides, stride, padding, dilation).to(torch.int32)
    assert torch.equal(found, expected)
    assert torch.equal(
        integer_convolution(
            images, weight, zero, stride, padding, dilation, channels // weight.shape[1]
        ),
        expected,
    )
    assert found.stride() == program(images, weight).stride()


@pytest.mark.parametrize("room", [1 << 12, 1 << 19])
def test_long_windows_are_gathered_part_by_part(monkeypatch, room):
    monkeypatch.setattr(printer, "ROOM", room)
    images = integers((2, 150, 7, 9), torch.uint8, "random")
    weight = integers((70, 150, 3, 5), torch.int8, "random")
    compiled = fxkit.compile(lambda x, w: convolve(x, w, 9, (1, 1), (1, 2), (1, 1)))
    for _ in range(2):
        found = compiled(images, weight)
    assert "fx_integer_convolution<" in compiled.compiled_modules[-1].source
    assert torch.equal(found.long(), exact(images, weight, 9, (7, 9), (1, 1), (1, 2), (1, 1)))


def test_images_that_lie_apart_are_copied_by_torch():
    images = torch.randint(0, 256, (1, 20, 9, 9), dtype=torch.uint8)
    weight = integers((20, 20, 3, 3), torch.int8, "random")
    compiled = fxkit.compile(lambda x, w: convolve(x, w, 9, (1, 1), (1, 1), (1, 1)))
    for _ in range(2):
        found = compiled(images, weight)
    assert torch.equal(found.long(), exact(images, weight, 9, (9, 9), (1, 1), (1, 1), (1, 1)))
    (module,) = compiled.compiled_modules
    assert "do not have their channels innermost" in str(module.report())


class HalfRead(torch.nn.Module):
    """A convolution that is joined to its input, and of which then nothing is read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return torch.cat([h, self.second(h)], 1)[:, :8].mean((2, 3))


@torch.no_grad()
def test_a_region_may_read_nothing_of_a_product_that_is_joined():
    net, x = HalfRead().eval(), torch.randn(2, 3, 11, 9)
    quantized = fxkit.quantize(net, fxkit.quantization.int8_static(), [(x,)])
    compiled = fxkit.compile(quantized)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), quantized(x))
