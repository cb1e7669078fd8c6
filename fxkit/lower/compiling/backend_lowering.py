"""`to_backend`: a graph whose fused regions run as kernels that someone else makes of loop IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.lower.compiling.compiled_module import CompiledModule
from fxkit.lower.compiling.inferred_types import typed
from fxkit.lower.compiling.kernel_builds import BuiltKernels
from fxkit.lower.compiling.pipeline import KernelTarget, lower_typed
from fxkit.lower.compiling.plan import Plan
from fxkit.lower.compiling.whole_operators import Choosing
from fxkit.lower.fusion.policy import Policy
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.passes.manager.instruments import Instrument

MakeFunction = Callable[[Kernel], Callable[..., int | None]]
"""Makes a function of the addresses of a kernel's buffers, in their order."""

_LEFT = Choosing.all_library("it is left to torch: no product, convolution or attention is loop IR")


def to_backend(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    make: MakeFunction,
    policy: Policy | None = None,
    instruments: tuple[Instrument, ...] = (),
) -> CompiledModule:
    """Lower a graph to the loop IR, and let a backend of your own run its kernels.

    What is pointwise, reduces or moves elements becomes kernels; equal ones are made once. All
    other nodes, products and convolutions among them, run in ATen as before. When gradients are on
    and asked for, the original graph runs.

    Args:
        gm: A graph of torch-level or ATen-level calls. It is not changed, but for the types that
            are recorded on its nodes.
        args: Inputs of the types to compile for; calls with other types run the original graph.
        kwargs: Keyword inputs.
        make: Makes what runs a kernel: a function of the addresses of its buffers, then the number
            of threads. The function returns another number than 0 where a check of the kernel does
            not hold; then torch computes the region, and raises its error.
        policy: When a kernel pays. A subclass says by `refusal` which kernels `make` does not take.
        instruments: What is told of each step.

    Returns:
        A module that is called like `gm`.

    Raises:
        InvalidGraphError: When an input is missing, or a node can't take its operands.
        UnsupportedError: When `gm` is no `GraphModule`, `args` is not a tuple, or `make` returns
            no function.

    Example:
        >>> import ctypes, torch, fxkit
        >>> def fill(kernel):
        ...     print(kernel)
        ...     def run(x, out, threads):
        ...         ctypes.memmove(out, x, 8)
        ...     return run
        >>> gm = fxkit.symbolic_trace(lambda x: x.neg().neg())
        >>> module = fxkit.lower.to_backend(gm, (torch.ones(2),), make=fill)
        kernel [2] []
          %0: f32 = load in0[1]
          %1: f32 = neg %0
          %2: f32 = neg %1
          store out0[1] %2
        >>> module(torch.ones(2))
        tensor([1., 1.])
    """
    typed(gm, args, kwargs)

    def build(kernels: Mapping[str, Kernel]) -> BuiltKernels:
        return _MadeKernels(made={name: _made(make, kernel) for name, kernel in kernels.items()})

    return lower_typed(gm, policy, KernelTarget(_LEFT, build=build), instruments)


def _made(make: MakeFunction, kernel: Kernel) -> Callable[..., int | None]:
    function = make(kernel)
    if not callable(function):
        raise UnsupportedError(
            f"expected make to return a function that runs a kernel, got {function!r}",
            hint="return one of the addresses of its buffers, then the number of threads; a "
            "subclass of Policy says by refusal which kernels make does not take",
        )
    return function


@dataclass
class _MadeKernels(BuiltKernels):
    """Kernels that a backend made.

    Attributes:
        made: Name of a kernel → what runs it.
    """

    made: dict[str, Callable[..., int | None]] = field(default_factory=dict)

    def bind(self, plan: Plan, reasons: Mapping[str, str]) -> None:
        """Give each call of a plan its function."""
        for region, name in plan.kernel_of.items():
            plan.calls[region].take(self.made[name])
