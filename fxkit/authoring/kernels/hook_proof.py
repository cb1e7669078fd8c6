"""The proof of a kernel's hook: it is called once for each element, with the element's position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from fxkit.analysis.equivalence import assert_equivalent
from fxkit.authoring.kernels.epilogue_fusion import FuseEpilogues, KernelWithHook
from fxkit.authoring.kernels.native import NativeKernel
from fxkit.errors import NumericsError
from fxkit.lower.compiling.inferred_types import typed
from fxkit.lower.fusion.policy import Policy
from fxkit.passes.manager.manager import PassManager

Isolation = Callable[[NativeKernel], AbstractContextManager[Any]]


def prove_hook(kernel: KernelWithHook, values: Mapping[str, Any], isolation: Isolation) -> None:
    """Fuse a kernel with what tells positions apart, and compare.

    Args:
        kernel: The kernel.
        values: Operands and numbers that it accepts.
        isolation: Gives the block in which a kernel runs in a process of its own.

    Raises:
        NumericsError: Where the two differ.
        BuildError: Where the function does not compile with an epilogue.
    """
    tensors = [v.detach() for v in values.values() if isinstance(v, torch.Tensor)]
    with torch.no_grad():
        result = kernel.reference(*values.values())
    if not isinstance(result, torch.Tensor):
        return
    generator = torch.Generator().manual_seed(0)
    other = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
    program = _program(kernel, values)
    args = (*tensors, other)
    typed(program, args)
    PassManager((FuseEpilogues((kernel,), Policy()),), args=args, verify="structure").run(program)
    targets = {node.target for node in program.graph.nodes}
    found = [n for op, n in kernel.with_epilogues.values() if op in targets]
    if not found:
        return
    reference = found[0].reference
    with torch.no_grad(), isolation(found[0]):
        try:
            assert_equivalent(
                lambda *given: reference(*_filled(values, given)),
                lambda *given: found[0](*_filled(values, given)),
                args,
            )
        except NumericsError as error:
            raise NumericsError(
                f"expected {kernel.name} to store epilogue(value, index) once for each element, "
                f"with its position in the result, got another result: {error.message}",
                hint="index counts elements of the result row by row",
            ) from None


def _filled(values: Mapping[str, Any], given: tuple[Any, ...]) -> list[Any]:
    """Return what a kernel takes: tensors in the places of tensors, then what is left of them."""
    rest = iter(given)
    own = [next(rest) if isinstance(v, torch.Tensor) else v for v in values.values()]
    return [*own, *rest]


def _program(kernel: KernelWithHook, values: Mapping[str, Any]) -> fx.GraphModule:
    """Return a program that goes on with a result in a way that differs at each element."""
    graph = fx.Graph()
    operands = [
        graph.placeholder(name) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    ]
    other = graph.placeholder("other_operand")
    result = graph.call_function(kernel.operator, tuple(operands))
    halved = graph.call_function(torch.mul, (result, 0.5))
    graph.output(graph.call_function(torch.add, (halved, other)))
    return fx.GraphModule(torch.nn.Module(), graph)
