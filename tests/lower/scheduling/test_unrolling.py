"""Short rows across memory, written out: stacks, channels, every reduction and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fxkit
from fxkit.lower import CompiledModule, to_cpp
from fxkit.lower.scheduling.unrolling import MAX_ROW, is_short, unrolled


def compiled(fn: Callable[..., Tensor], *args: Tensor) -> CompiledModule:
    module = to_cpp(fxkit.capture(fn, args).graph_module, args)
    assert all(region.kernel for region in module.regions)
    return module


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "prod": lambda x: x.prod(1),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(1),
    "argmax": lambda x: x.argmax(1),
    "var": lambda x: x.var(1),
    "softmax": lambda x: x.softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x / x.norm(dim=1, keepdim=True),
    "any": lambda x: (x > 1).any(1),
}


@pytest.mark.parametrize("channels", [2, 3, MAX_ROW, MAX_ROW + 1])
def test_channels_are_reduced_as_in_eager(channels: int) -> None:
    def program(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(fn(x) for fn, x in zip(REDUCTIONS.values(), inputs, strict=True))

    inputs = [torch.randn(3, channels, 19) for _ in REDUCTIONS]
    for x in inputs[:-4]:
        x[0, 1, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    inputs[0][1, :, 3] = -0.0
    module = compiled(program, *inputs)
    for name, found, expected in zip(REDUCTIONS, module(*inputs), program(*inputs), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True, msg=name)
    assert torch.equal(module(*inputs)[0].signbit()[1, 3], program(*inputs)[0].signbit()[1, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_what_comparisons_tell_is_counted_in_rests_of_vectors(dtype: torch.dtype) -> None:
    programs: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: (x > 1).any(1),
        lambda x: (x > -1).all(1),
        lambda x: (x > 1).sum(1),
        lambda x: (x > 1).int().amax(1),
    )
    for program in programs:
        for _ in range(3):
            x = (torch.randn(3, MAX_ROW, 19) * 2).to(dtype)
            assert torch.equal(compiled(program, x)(x), program(x))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_a_stack_is_reduced_without_guards(dtype: torch.dtype) -> None:
    def program(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        both = torch.stack([x, y, z * 2])
        return both.sum(0), both.amax(0), both.float().softmax(0)

    inputs = tuple((torch.randn(5, 33) * 4).abs().to(dtype) for _ in range(3))
    module = compiled(program, *inputs)
    for found, expected in zip(module(*inputs), program(*inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert " ? p" not in module.source


def test_what_is_written_out_has_no_rows() -> None:
    module = compiled(lambda x: x.softmax(1), torch.randn(2, 4, 9))
    (kernel,) = module.kernels.values()
    assert is_short(kernel)
    short = unrolled(kernel)
    assert short.row_rank == 0 and short.points * 4 == kernel.points
    assert len(short.stores) == 4 and not any(i.is_reduction for i in short.body)
    along = compiled(lambda x: x.softmax(2), torch.randn(2, 9, 4))
    assert not any(map(is_short, along.kernels.values()))
