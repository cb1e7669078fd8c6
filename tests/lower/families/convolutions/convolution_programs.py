"""Programs that begin with a packed convolution, and what it takes to run their kernels alone."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxkit.analysis.tensor_types import propagate_types
from fxkit.demo.judge import relative_error
from fxkit.lower import to_cpp
from fxkit.lower.building import toolchain
from fxkit.lower.cpp_printer import print_unit
from fxkit.lower.families.convolutions.nodes import convolution_product
from fxkit.lower.families.products.regions import alone
from fxkit.lower.library_calls import packed_convolution as packed
from fxkit.lower.loop_ir.interpreter import interpret
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.loop_ir.runtime_parameters import packed_parameters

Following = Callable[..., torch.Tensor]


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def innermost(*shape: int) -> torch.Tensor:
    return rand(*shape).contiguous(memory_format=torch.channels_last)


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class Program(nn.Module):
    """A packed convolution, and what follows it."""

    def __init__(
        self,
        shape: tuple[int, ...],
        groups: int = 1,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int = 1,
        *,
        has_bias: bool = False,
        norm: str = "",
        then: Following = as_it_is,
    ) -> None:
        super().__init__()
        self.weight, self.then = nn.Parameter(rand(*shape)), then
        self.bias = nn.Parameter(rand(shape[0], 1)[:, 0]) if has_bias else None
        self.settings = tuple(
            value if isinstance(value, tuple) else (value, value)
            for value in (stride, padding, dilation)
        )
        self.groups, self.slot = groups, packed.new_slot()
        given = {"mean": rand(shape[0]), "variance": rand(shape[0]).square() + 0.1}
        given |= {"scale": rand(shape[0]) + 2, "shift": rand(2, shape[0])[1]}
        for name in ("mean", "variance", "scale", "shift"):
            self.register_buffer(name, given[name] if name[0] in norm else None)
        if "v" in norm and "h" not in norm:
            self.shift = None
        if "v" in norm and "c" not in norm:
            self.scale = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.convolved(x))

    def convolved(self, x: torch.Tensor) -> torch.Tensor:
        return packed.operator()(
            x, self.weight, self.bias, self.mean, self.variance, self.scale, self.shift, 1e-5,
            *self.settings, self.groups, self.slot,
        )  # fmt: skip


class Residual(Program):
    """A convolution whose result meets another input."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.then(self.convolved(x), y)


def exactly(program: Program, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Compute a program with torch's own operators, in the dtype of its input."""
    wide = {n: None if t is None else t.to(x.dtype) for n, t in vars_of(program).items()}
    weight, bias = wide["weight"], wide["bias"]
    found = F.conv2d(x, weight, bias, *program.settings, program.groups)
    if wide["mean"] is not None:
        statistics = (wide[name] for name in ("mean", "variance", "scale", "shift"))
        found = F.batch_norm(found, *statistics, False, 0.0, 1e-5)
    return program.then(found, *(other.to(x.dtype) for other in others))


def vars_of(program: Program) -> dict[str, torch.Tensor | None]:
    names = ("weight", "bias", "mean", "variance", "scale", "shift")
    return {name: getattr(program, name) for name in names}


@torch.no_grad()
def lowered(program: Program, *args: torch.Tensor) -> list[tuple[str, ...]]:
    """Lower a program, hold it to float64, and return the names in each region with a kernel."""
    compiled = to_cpp(fx.symbolic_trace(program), args)
    found = compiled(*args)
    assert compiled.report().calls == 1 and compiled.report().kernel_misses == 0
    exact = exactly(program, args[0].double(), *args[1:])
    eager = exactly(program, *args)
    assert found.shape == eager.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    bound = 2 * max(relative_error(eager, exact), 2.0**-23)
    assert relative_error(found, exact) <= bound
    return [region.nodes for region in compiled.regions if region.kernel]


def kernel_of(program: Program, *args: torch.Tensor) -> tuple[Kernel, list[torch.Tensor]]:
    """Return the kernel of a program's convolution alone, and what it reads."""
    gm = fx.symbolic_trace(program)
    propagate_types(gm, args)
    (node,) = (n for n in gm.graph.nodes if n.target is packed.operator())
    emitted = alone(convolution_product(node, gm))
    tensors = [getattr(program, o.target) if o.op == "get_attr" else args[0]
               for o in emitted.inputs]  # fmt: skip
    return emitted.kernel, [tensor.detach() for tensor in tensors]


def call(function: Any, kernel: Kernel, tensors: list[torch.Tensor]) -> None:
    numbers = packed_parameters(kernel)
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * len(tensors) + (
        [ctypes.c_char_p] if numbers else []
    ) + [ctypes.c_long]  # fmt: skip
    function(*(t.data_ptr() for t in tensors), *([numbers] if numbers else []), 2)


def hold_to_interpreter(
    handle: ctypes.CDLL,
    kernels: Sequence[Kernel],
    made: Sequence[tuple[Kernel, list[torch.Tensor]]],
) -> None:
    """Compare the built functions `k0`, `k1`, ... with the interpreter.

    Args:
        handle: The library.
        kernels: What was printed.
        made: The kernels that the interpreter computes, and what they read.
    """
    for number, (kernel, inputs) in enumerate(made):
        expected, found = (torch.full(kernel.sizes, float("nan")) for _ in range(2))
        assert interpret(kernel, inputs, [expected])
        call(getattr(handle, f"k{number}"), kernels[number], [*inputs, found])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def numbered(kernels: Sequence[Kernel]) -> dict[str, Kernel]:
    """Return kernels by the names of their functions: `k0`, `k1`, ..."""
    return {f"k{number}": kernel for number, kernel in enumerate(kernels)}


def built_for(march: str, kernels: Sequence[Kernel], folder: Path) -> ctypes.CDLL:
    """Build kernels for another kind of processor.

    Args:
        march: The kind, as compilers name it.
        kernels: The kernels.
        folder: Where the files are written.
    """
    (folder / "kernels.cpp").write_text(print_unit(numbered(kernels), None))
    chain = toolchain.current()
    flags = [flag for flag in chain.flags if not flag.startswith("-march")]
    command = [chain.compiler, "-shared", "-fPIC", *flags, f"-march={march}", "kernels.cpp"]
    subprocess.run([*command, "-o", "kernels.so"], cwd=folder, check=True, capture_output=True)
    return ctypes.CDLL(str(folder / "kernels.so"))
