"""Graphs for the tests of `fxkit.lower`, and how their results are compared."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils import _pytree as pytree

from fxkit.analysis.tensor_types import propagate_types
from fxkit.lower import CompiledModule, Policy, to_cpp
from fxkit.lower.compiling.plan import make_plan
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.fusion.partitioner import partition
from fxkit.lower.loop_ir.loop_ir import Kernel

# Compile whatever can be compiled, be it ever so small.
ALWAYS = Policy(min_members=1)


def rand(*shape: int) -> torch.Tensor:
    """Return random numbers, the same ones for a shape at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def spread_over(names: Iterable[str], dtypes: Sequence[torch.dtype]) -> list[Any]:
    """Return cases of each name with one of the dtypes; with the others they are for the sweeps."""
    return [
        pytest.param(
            name,
            dtype,
            id=f"{name}-{dtype}",
            marks=() if (row + column) % len(dtypes) == 0 else (pytest.mark.sweep,),
        )
        for row, name in enumerate(names)
        for column, dtype in enumerate(dtypes)
    ]


def beside_float64(
    program: Callable[..., Any], *args: torch.Tensor, policy: Policy | None = None
) -> tuple[CompiledModule, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lower a program of one result, and run it as eager does.

    Returns:
        The compiled module, its result, eager's, and that of float64.
    """
    gm = program if isinstance(program, fx.GraphModule) else fx.symbolic_trace(program)
    compiled = to_cpp(gm, args, policy=policy)
    with torch.no_grad():
        found, eager = compiled(*args), gm(*args)
        exact = gm(*[a.double() for a in args])
    assert compiled.report().calls == 1
    assert compiled.report().kernel_misses == 0
    assert (found.dtype, found.shape, found.stride()) == (eager.dtype, eager.shape, eager.stride())
    return compiled, found, eager, exact


def compile_all(
    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]],
    results: Sequence[int] = (),
    lowering: Callable[..., CompiledModule] | None = None,
) -> tuple[CompiledModule, list[torch.Tensor], list[fx.Node]]:
    """Compile many calls as one graph, so that the compiler is started once.

    Args:
        calls: `(function, arguments, keyword arguments)`; each tensor becomes an input of its own,
            so that no two calls share a region.
        results: How many results each call has, where one has several.
        lowering: Compiles a graph for its inputs; `to_cpp` where it is left out.

    Returns:
        The compiled module, its inputs, and the node of each call.
    """
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []
    nodes: list[fx.Node] = []

    def as_input(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inputs.append(value)
            return graph.placeholder(f"x{len(inputs)}")
        return value

    bound = [pytree.tree_map(as_input, (list(args), kwargs)) for _, args, kwargs in calls]
    for (function, _, _), (args, kwargs) in zip(calls, bound, strict=True):
        nodes.append(graph.call_function(function, tuple(args), kwargs))
    given: list[Any] = list(nodes)
    for place, count in enumerate(results):
        if count > 1:
            node = nodes[place]
            given[place] = tuple(
                graph.call_function(operator.getitem, (node, i)) for i in range(count)
            )
    graph.output(tuple(given))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    lowering = lowering or functools.partial(to_cpp, policy=ALWAYS)
    return lowering(gm, tuple(inputs)), inputs, nodes


def fused_names(compiled: CompiledModule) -> set[str]:
    """Return the names of the nodes that kernels compute."""
    return {name for region in compiled.regions if region.kernel for name in region.nodes}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference in epsilons of the dtype, relative to max(1, |expected|).

    Not-a-number and infinities must be in the same places; where not, the difference is infinite.
    """
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    if not expected.numel():
        return 0.0
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(found, expected) else float("inf")
    a, b = found.double(), expected.double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = (a - b).abs() / b.abs().clamp(min=1) / torch.finfo(expected.dtype).eps
    error = torch.where(same, torch.zeros_like(error), error)
    return float(error.nan_to_num(float("inf"), float("inf"), float("inf")).max())


def kernel_of(fn: Callable[..., Any], *args: torch.Tensor) -> Kernel:
    """Return the one kernel of a function; nothing is built."""
    gm = fx.symbolic_trace(fn)
    propagate_types(gm, args)
    (kernel,) = make_plan(gm, partition(gm, ALWAYS)).kernels.values()
    return kernel


def text_of(fn: Callable[..., Any], *args: torch.Tensor, glibc: Any = (2, 36)) -> str:
    """Return the C++ text of the one kernel of a function; nothing is built."""
    return print_unit({"k": kernel_of(fn, *args)}, glibc)


def body(text: str) -> str:
    """Return what a text says of the kernel itself, without the functions that it calls."""
    return text[text.rindex('extern "C"', 0, text.index("void k(")) :]


def halves_of(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers of float16, the same ones for a seed at each call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def compiled_for(program: Callable[..., Any], *args: torch.Tensor) -> CompiledModule:
    """Compile a program of which a part at least runs in a kernel."""
    module = to_cpp(fx.symbolic_trace(program), args, policy=ALWAYS)
    assert any(region.kernel for region in module.regions)
    return module
