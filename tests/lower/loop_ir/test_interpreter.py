"""Kernels written by hand: the interpreter against torch, and both printers against it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from fxkit.lower.building.build import build
from fxkit.lower.building.toolchain import vector_library
from fxkit.lower.cpp_printer import print_kernel, print_unit
from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Kernel, Store
from fxkit.lower.scheduling.axis_order import runs_down_columns


def buffers(inputs: Sequence[torch.Tensor], *outputs: torch.dtype) -> tuple[Buffer, ...]:
    return tuple(
        [Buffer(f"in{i}", t.dtype, False) for i, t in enumerate(inputs)]
        + [Buffer(f"out{i}", dtype, True) for i, dtype in enumerate(outputs)]
    )


def run(
    kernel: Kernel, inputs: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
) -> tuple[bool, list[torch.Tensor]]:
    """Interpret a kernel, hold the printed one to that, and return the result."""
    dtypes = [b.dtype for b in kernel.buffers if b.is_output]
    made = [torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
    holds = interpret(kernel, inputs, made)
    printed = [torch.zeros_like(t) for t in made]
    function = build(print_unit({"k": kernel}, vector_library())).handle.k
    function.argtypes = [ctypes.c_void_p] * len(kernel.buffers) + [ctypes.c_long]
    function.restype = ctypes.c_long if kernel.may_fail else None
    fault = function(*[t.data_ptr() for t in (*inputs, *printed)], 2)
    assert bool(fault) != holds
    if holds:
        torch.testing.assert_close(printed, made, rtol=1e-6, atol=1e-6)
    return holds, made


def test_an_index_is_an_address_as_a_number() -> None:
    builder = Builder()
    value = builder.index((10, -1), 5).cast(torch.float32) * 0.5
    kernel = Kernel(
        (3, 70), 0, buffers([], torch.float32), tuple(builder.body),
        (Store(Access(0, (70, 1)), value.position),),
    )  # fmt: skip
    _, (found,) = run(kernel, [], [(3, 70)])
    expected = (torch.arange(3).view(3, 1) * 10 - torch.arange(70) + 5) * 0.5
    torch.testing.assert_close(found, expected)
    assert "index [10, -1] + 5" in str(kernel)


def embedding(ids: torch.Tensor, table: torch.Tensor) -> Kernel:
    builder = Builder()
    index = builder.load(Access(0, (1, 0)), torch.int64)
    is_within = builder.check((index >= 0) & (index < table.shape[0]))
    row = builder.load(Access(1, (0, 1), scales=(table.shape[1],)), table.dtype, [index], is_within)
    store = Store(Access(2, (table.shape[1], 1)), (row * 2).position)
    return Kernel(
        (len(ids), table.shape[1]), 1, buffers([ids, table], table.dtype), tuple(builder.body),
        (store,),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_an_embedding_reads_where_its_indices_say(dtype: torch.dtype) -> None:
    table = torch.randint(-50, 50, (9, 33)).to(dtype)
    ids = torch.tensor([3, 0, 8, 8, 1])
    holds, (found,) = run(embedding(ids, table), [ids, table], [(5, 33)])
    assert holds
    torch.testing.assert_close(found, table[ids] * 2)


@pytest.mark.parametrize("bad", [-1, 9, 2**62, -(2**63)])
def test_an_index_out_of_range_is_a_fault(bad: int) -> None:
    table, ids = torch.randn(9, 33), torch.tensor([3, 0, bad])
    assert run(embedding(ids, table), [ids, table], [(3, 33)])[0] is False


def padded(width: int) -> tuple[Kernel, torch.Tensor]:
    """Return a kernel of a row of `width` with two sevens before it and three after it."""
    x = torch.randn(6, width)
    builder = Builder()
    place = builder.index((0, 1), -2)
    guard = (place >= 0) & (place < width)
    value = builder.load(Access(0, (width, 1), -2), torch.float32, (), guard, 7.0)
    store = Store(Access(1, (width + 5, 1)), value.position)
    kernel = Kernel((6, width + 5), 0, buffers([x], torch.float32), tuple(builder.body), (store,))
    return kernel, x


@pytest.mark.parametrize("width", [1, 17, 64])
def test_a_guarded_load_does_not_touch_memory_elsewhere(width: int) -> None:
    kernel, x = padded(width)
    _, (found,) = run(kernel, [x], [(6, width + 5)])
    torch.testing.assert_close(found, torch.nn.functional.pad(x, (2, 3), value=7.0))


def pooling(x: torch.Tensor, size: int, monoid: str) -> Kernel:
    """Return a kernel that folds windows of a matrix; the row is the window."""
    h, w = x.shape
    builder = Builder()
    value = builder.reduce(monoid, builder.load(Access(0, (2 * w, 2, w, 1)), torch.float32))
    store = Store(Access(1, (w // 2, 1, 0, 0)), value.position)
    return Kernel(
        (h // 2, w // 2, size, size), 2, buffers([x], torch.float32), tuple(builder.body), (store,)
    )


def test_a_row_may_walk_a_dimension_that_an_outer_axis_walks_too() -> None:
    x = torch.randn(8, 24)
    _, (found,) = run(pooling(x, 2, "max"), [x], [(4, 12)])
    expected = torch.nn.functional.max_pool2d(x[None], 2)[0]
    torch.testing.assert_close(found, expected)


def test_columns_are_guarded_and_gathered_too() -> None:
    x, ids = torch.randint(-9, 9, (40, 70)).float(), torch.randint(0, 40, (25,))
    builder = Builder()
    index = builder.load(Access(1, (0, 1)), torch.int64)
    is_within = builder.check((index >= 0) & (index < 40))
    value = builder.load(Access(0, (1, 0), scales=(70,)), torch.float32, [index], is_within)
    column = builder.index((1, 0))
    plain = builder.load(Access(0, (1, 70)), torch.float32, (), column >= 3, -1.0)
    sums = [builder.reduce("add", v) for v in (value, plain)]
    total: Ref = sums[0] + sums[1] * column.cast(torch.float32)
    kernel = Kernel(
        (70, 25), 1, buffers([x, ids], torch.float32), tuple(builder.body),
        (Store(Access(2, (1, 0)), total.position),),
    )  # fmt: skip
    assert runs_down_columns(kernel)
    assert "long l = 0" in print_kernel(kernel, "k")
    holds, (found,) = run(kernel, [x, ids], [(70,)])
    below = x[:25].clone()
    below[:, :3] = -1
    torch.testing.assert_close(found, x[ids].sum(0) + below.sum(0) * torch.arange(70))
    assert holds
    outside = replace(kernel, sizes=(70, 25))
    assert not run(outside, [x, torch.full((25,), 40)], [(70,)])[0]


def test_a_sum_over_all_rows_is_carried_out_beside_each_row() -> None:
    x = torch.rand(70, 50)
    builder = Builder()
    value = builder.load(Access(0, (50, 1)), torch.float32)
    share = value * builder.reduce("add", value)
    kernel = Kernel(
        (70, 50), 1, buffers([x], torch.float32, torch.float32), tuple(builder.body),
        (
            Store(Access(1, (50, 1)), share.position),
            Store(Access(2, (0, 1)), share.position, is_sum=True),
        ),
    )  # fmt: skip
    _, (found, total) = run(kernel, [x], [(70, 50), (50,)])
    expected = x.double() * x.double().sum(1, keepdim=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.double(), expected.sum(0), rtol=1e-5, atol=1e-5)
    assert "sum out1[0, 1]" in str(kernel)
