"""Numbers read at run time: one text for many sizes, the same results as with the numbers in it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.lower.building.build import build
from fxkit.lower.building.toolchain import vector_library
from fxkit.lower.codegen.cpp.calling_convention import print_packed
from fxkit.lower.compiling import whole_operators
from fxkit.lower.compiling.plan import make_plan
from fxkit.lower.cpp_printer import print_kernel, print_unit
from fxkit.lower.fusion.partitioner import partition
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import (
    RuntimeFloat,
    RuntimeInt,
    ceil_div,
    fully_parametrised,
    packed_parameters,
    parametrised,
    runtime_parameters,
    split_parameters,
)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


Made = tuple[torch.Tensor, ...]
Case = tuple[Callable[..., Any], Callable[[int, int], Made], list[tuple[int, int]]]

# A function, its inputs at two sizes, and some pairs of sizes at which its structure is the same.
CASES: dict[str, Case] = {
    "pointwise": (
        lambda x, y: torch.relu(x + y) * 2,
        lambda a, b: (rand(a, b), rand(a, b)),
        [(3, 5), (70, 129), (2, 4096), (1, 13)],
    ),
    "broadcast": (
        lambda x, y: torch.exp(x * y) + 1,
        lambda a, b: (rand(a, 1, b), rand(7, 1)),
        [(3, 5), (2, 129), (3, 5000)],
    ),
    "softmax": (
        lambda x: torch.softmax(x * 0.5, -1),
        lambda a, b: (rand(a, b),),
        [(3, 5), (2, 1024), (9, 3000), (4, 8000)],
    ),
    "layer norm": (
        lambda x, w: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True)) * w,
        lambda a, b: (rand(a, b), rand(b)),
        [(3, 5), (2, 1025), (9, 64)],
    ),
    "mean of columns": (
        lambda x: x.mean(0),
        lambda a, b: (rand(a, b),),
        [(3, 9), (200, 64), (65, 130), (2, 100)],
    ),
    "sum of two axes": (
        lambda x: (x * x).sum((1, 2)),
        lambda a, b: (rand(a, 6, b).transpose(1, 2),),
        [(3, 9), (2, 70), (5, 2000)],
    ),
    "turned": (
        lambda x, y: x + y,
        lambda a, b: (rand(a, b), rand(b, a).t()),
        [(9, 11), (64, 64), (65, 200), (2, 70)],
    ),
    "flipped": (
        lambda x: x.flip(0) * 2,
        lambda a, b: (rand(a, b),),
        [(9, 11), (4, 7)],
    ),
    "embedding": (
        lambda i, w: F.embedding(i, w) * 2,
        lambda a, b: (torch.arange(a * 3).view(a, 3) % b, rand(b, 20)),
        [(2, 6), (9, 11)],
    ),
    "cumulative": (
        lambda x: torch.cumsum(x, -1),
        lambda a, b: (rand(a, b),),
        [(2, 6), (9, 110)],
    ),
    "product": (
        lambda x, w: torch.relu(x @ w),
        lambda a, b: (rand(a, b), rand(b, 50)),
        [(2, 6), (3, 300), (150, 20), (800, 33)],
    ),
    "products": (
        lambda x, y: x @ y,
        lambda a, b: (rand(3, 2, a, b), rand(3, 2, b, a)),
        [(4, 6), (5, 64), (70, 20)],
    ),
    "attention": (
        attend,
        lambda a, b: tuple(rand(a, b, 2, 8).transpose(1, 2) for _ in range(3)),
        [(2, 6), (4, 50), (3, 130)],
    ),
}  # fmt: skip


def kernel_and_inputs(fn: Callable[..., Any], args: Made) -> tuple[Kernel, list[torch.Tensor]]:
    gm = fx.symbolic_trace(fn) if fn is not attend else _traced_attention()
    propagate_types(gm, args)
    with mock.patch.object(whole_operators, "objection", lambda *_: None):
        plan = make_plan(gm, partition(gm, Policy(min_members=1)))
    (kernel,) = plan.kernels.values()
    (call,) = plan.calls.values()
    given = dict(zip((n.name for n in gm.graph.find_nodes(op="placeholder")), args, strict=True))
    node = next(n for n in plan.graph.nodes if n.target is call)
    return kernel, [given[operand.name] for operand in node.all_input_nodes]


def _traced_attention() -> fx.GraphModule:
    graph = fx.Graph()
    operands = tuple(graph.placeholder(name) for name in "qkv")
    target = F.scaled_dot_product_attention
    graph.output(graph.call_function(target, operands, {"is_causal": True}))
    return fx.GraphModule({}, graph)


@functools.cache
def kernels_of(name: str) -> list[tuple[Kernel, list[torch.Tensor]]]:
    fn, make, sizes = CASES[name]
    return [kernel_and_inputs(fn, make(*pair)) for pair in sizes]


@functools.cache
def library() -> ctypes.CDLL:
    """Build the kernel of the first sizes of each case."""
    kernels = {f"k{n}": fully_parametrised(kernels_of(name)[0][0]) for n, name in enumerate(CASES)}
    unit = print_unit(kernels, vector_library())
    return build(f"{unit}\n{print_packed(kernels)}").handle


@pytest.mark.parametrize("name", CASES)
def test_one_text_serves_all_sizes(name: str) -> None:
    kernels = [kernel for kernel, _ in kernels_of(name)]
    assert len(set(kernels)) == len(kernels)
    assert len({split_parameters(kernel)[0] for kernel in kernels}) == 1
    assert len({print_kernel(fully_parametrised(kernel), "k") for kernel in kernels}) == 1


@pytest.mark.parametrize("name", CASES)
def test_one_build_computes_all_sizes(name: str) -> None:
    function = getattr(library(), f"k{list(CASES).index(name)}_packed")
    function.restype = ctypes.c_long
    for kernel, inputs in kernels_of(name):
        room = kernel.points + 64
        made = [torch.zeros(room, dtype=b.dtype) for b in kernel.buffers if b.is_output]
        expected = [torch.zeros_like(tensor) for tensor in made]
        assert interpret(kernel, inputs, expected)
        numbers = packed_parameters(fully_parametrised(kernel))
        pointers = [tensor.data_ptr() for tensor in (*inputs, *made)]
        address = ctypes.cast(ctypes.c_char_p(numbers), ctypes.c_void_p).value
        array = (ctypes.c_void_p * (len(pointers) + 1))(*pointers, address)
        for threads in (1, 2):
            assert function(array, ctypes.c_long(threads)) == 0
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_a_kernel_without_free_numbers_prints_as_ever() -> None:
    for name in CASES:
        kernel, _ = kernels_of(name)[0]
        text = print_kernel(parametrised(kernel, frozenset()), "k")
        assert text == print_kernel(kernel, "k")
        assert "numbers" not in text
        assert not runtime_parameters(kernel)


def test_some_numbers_are_free() -> None:
    kernel, _ = kernels_of("softmax")[0]
    _, numbers = split_parameters(kernel)
    some = parametrised(kernel, frozenset({numbers.index(3)}))
    text = print_kernel(some, "k")
    assert [int(number) for number in runtime_parameters(some)] == [3]
    assert "tile < ((n0 + 63) / 64)" in text
    assert "j < 5" in text


def test_arithmetic_is_that_of_the_text() -> None:
    n, m = RuntimeInt(130, "n0"), RuntimeInt(-7, "n1")
    assert str(ceil_div(n, 64)) == "((n0 + 63) / 64)"
    assert ceil_div(n, 64) == 3
    assert str(2 * n + 1) == "((n0 * 2) + 1)"
    assert str(m // 2) == "-4"  # C++ would say -3
    assert int(m - 3) == -10


def test_constants_are_free_as_they_are() -> None:
    kernel, _ = kernels_of("mean of columns")[0]
    floats = [
        number
        for number in runtime_parameters(fully_parametrised(kernel))
        if isinstance(number, RuntimeFloat)
    ]
    assert floats
    assert 3.0 in floats or pytest.approx(1 / 3) in floats
