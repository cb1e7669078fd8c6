"""`to_cuda` for tensors on the processor, where its text runs under a shim."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

import fxkit.compiling.graph_compiler
from fxkit.lower import CompiledModule
from fxkit.lower.building.build import Library
from fxkit.lower.codegen.cuda.printer import print_unit
from fxkit.lower.compiling import cuda_lowering
from fxkit.lower.compiling.cuda_launching import CudaCall
from fxkit.lower.compiling.cuda_lowering import INTEGER_PASSES, CudaPolicy
from fxkit.lower.compiling.kernel_builds import BuiltKernels
from fxkit.lower.compiling.pipeline import KernelTarget, LoweringState, lower
from fxkit.lower.compiling.whole_operators import Choosing
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime.kernel_call import KernelCall
from fxkit.lower.runtime.launcher import Launcher
from tests.lower.codegen.cuda.shim import build_on_cpu, run_on_cpu
from tests.lower.kernels import difference

_MULTIPLY, *_THEN = INTEGER_PASSES


class ShimCall(KernelCall):
    """Runs a kernel's CUDA text on the processor, with threads in either order."""

    def bind(self, library: ctypes.CDLL, name: str, numbers: bytes = b"") -> None:
        self._function = (library, name)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._function is None:
            return self.in_eager(*tensors)
        for tensor, known in zip(tensors, self.inputs, strict=True):
            assert (tensor.dtype, tensor.shape, tensor.stride()) == (
                (known.dtype, known.shape, known.stride)
            )
        results, again = (self._run(tensors, is_backward=order) for order in (False, True))
        for one, other in zip(results, again, strict=True):
            assert difference(one, other) == 0, "the order of threads matters"
        self.calls += 1
        return results[0] if len(results) == 1 else tuple(results)

    def _run(self, tensors: tuple[torch.Tensor, ...], *, is_backward: bool) -> list[torch.Tensor]:
        return run_on_cpu(
            *self._function,
            self.kernel,
            list(tensors),
            [torch.empty_strided(t.shape, t.stride or (), dtype=t.dtype) for t in self.outputs],
            is_backward=is_backward,
        )


class LaunchedCall(CudaCall):
    """Launches a kernel's CUDA text under a shim, from Python or from the binding."""

    def bind(self, library: ctypes.CDLL, name: str, numbers: bytes = b"") -> None:
        super().bind(library, name)
        self._device = torch.device("cpu", 0)
        stream, exchange = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (_stream, _same))
        self.launcher = Launcher(self._device, stream, exchange)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def _stream(device: int, stream: Any) -> int:
    stream[0] = None
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_int8)
def _same(device: int) -> int:
    return device


class ShimLowering:
    """Makes modules whose kernels are CUDA text under a shim.

    Args:
        folder: Where they are built.
        call: Calls a kernel.
    """

    def __init__(self, folder: Path, call: type[KernelCall] = ShimCall) -> None:
        self._folder = folder
        self._call = call

    def __call__(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> CompiledModule:
        return self._lowered(gm, args, may_change=False)

    def changed(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> CompiledModule:
        """Compile a graph that may change: a quantised one multiplies its integers."""
        return self._lowered(gm, args, may_change=True)

    def _lowered(
        self, gm: fx.GraphModule, args: tuple[Any, ...], *, may_change: bool
    ) -> CompiledModule:
        on_cpu = replace(_MULTIPLY, device="cpu")
        target = KernelTarget(
            Choosing.all_library("left to torch's library"),
            self._call,
            self._build,
            (on_cpu, *_THEN),
            packs_convolutions=False,
        )
        policy = CudaPolicy(min_members=1, gpu=torch.device("cpu"))
        module = lower(LoweringState(gm, args, policy=policy, target=target, packs=may_change))
        if self._call is ShimCall:
            module.native_program = None
        return module

    def _build(self, kernels: Mapping[str, Kernel]) -> BuiltKernels:
        built = BuiltKernels(print_unit(kernels))
        if kernels:
            begin = time.perf_counter()
            handle = build_on_cpu(built.source, self._folder, "-O0")
            library = Library(handle, self._folder, time.perf_counter() - begin, False)
            built.libraries.update(dict.fromkeys(kernels, library))
        return built


def compile_as_cuda_text(folder: Path) -> None:
    """Let `fxkit.compile` make CUDA text, and run it under a shim, in all of this process."""
    folder.mkdir(exist_ok=True)
    lowering = ShimLowering(folder)
    vars(fxkit.compiling.graph_compiler)["is_on_gpu"] = lambda gm, args: True
    vars(cuda_lowering)["changed_to_cuda"] = lambda gm, args, *_: lowering.changed(gm, args)
