"""A built kernel as a Python callable on tensors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxkit.ir.types import TensorType
from fxkit.lower.codegen.cpp.calling_convention import SUFFIX
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime.launcher import Launcher
from fxkit.lower.scheduling.kernel_cost import cost_of_point
from fxkit.torch_adapters.tensors import is_zero_tensor

# Operations below which waking the other threads costs more than they save.
PARALLEL_WORK = 300_000

_TENSORS = (torch.Tensor, torch.nn.Parameter)

# A forked process has none of the threads that OpenMP believes to have started.
_PROCESS = os.getpid()


def stores_its_values(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory holds its values, and no marks say what to make of them.

    Those of a conjugate do not, and zeros that autograd makes may have no memory at all.
    """
    return not (tensor.is_neg() or tensor.is_conj() or is_zero_tensor(tensor))


class KernelCall:
    """Calls a kernel on tensors of the types it was made for, and eager on any others.

    Args:
        name: Name of the call in the lowered graph.
        kernel: What it computes; None of a kernel that was not made of loop IR.
        function: The built function, or None until it is built.
        inputs: Types of the tensors it is called with.
        outputs: Types of the tensors it returns.
        eager: Computes the same with torch, from the same tensors, for other types.

    Attributes:
        calls: How often the kernel ran from here; programs call it by its address.
        misses: How often eager ran instead.
        work: Operations of a call, roughly.
        is_parallel: Whether they are worth several threads.
        address: Where its packed function lies, or None until it is built.
        parameters: What the function reads at run time, besides buffers.
        launcher: How the binding launches it on another device; None on the processor.
        scratch_bytes: Bytes that it needs beside its buffers; only where it is launched.
    """

    def __init__(
        self,
        name: str,
        kernel: Kernel | None,
        inputs: Sequence[TensorType],
        outputs: Sequence[TensorType],
        eager: Callable[..., Any],
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self._kernel = kernel
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.calls = 0
        self.misses = 0
        self._eager = eager
        self._function: Any = None
        self._expected = [(t.dtype, t.shape, t.stride) for t in inputs]
        self._made = [(t.shape, t.stride or (), t.dtype) for t in outputs]
        self.work = 0 if kernel is None else kernel.points * cost_of_point(kernel.body)
        self.is_parallel = self.work >= PARALLEL_WORK
        self.address: int | None = None
        self.parameters = b""
        self.launcher: Launcher | None = None
        self.scratch_bytes = 0

    @property
    def kernel(self) -> Kernel:
        """What it computes, as loop IR."""
        assert self._kernel is not None
        return self._kernel

    @property
    def may_fail(self) -> bool:
        """Whether the function may say that what it has written is void."""
        return self.kernel.may_fail

    def bind(self, library: ctypes.CDLL, name: str, parameters: bytes = b"") -> None:
        """Take the built function of this name, and the parameters that it is to read."""
        self.parameters = parameters
        function = getattr(library, name)
        self.address = ctypes.cast(getattr(library, name + SUFFIX), ctypes.c_void_p).value
        buffers = [ctypes.c_void_p] * len(self.kernel.buffers)
        function.argtypes = [*buffers, *([ctypes.c_char_p] if parameters else []), ctypes.c_long]
        function.restype = ctypes.c_long if self.kernel.may_fail else None
        self._function = function

    def take(self, function: Callable[..., int | None]) -> None:
        """Take a function of the addresses of the buffers, then the number of threads."""
        self._function = function

    def in_eager(self, *tensors: torch.Tensor) -> Any:
        """Compute the same with torch."""
        return self._eager(*tensors)

    def on_pointers(self, pointers: Sequence[int], threads: int) -> None:
        """Run the kernel on memory that is known to fit: its inputs, then its outputs."""
        self._function(*pointers, *self._extra, threads)

    @property
    def _extra(self) -> tuple[bytes, ...]:
        return (self.parameters,) if self.parameters else ()

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._function is None:
            return self._eager(*tensors)
        for tensor, (dtype, shape, stride) in zip(tensors, self._expected, strict=True):
            if (
                type(tensor) not in _TENSORS
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or not tensor.is_cpu
                or tensor.layout is not torch.strided
                or tensor.stride() != stride
                or not stores_its_values(tensor)
            ):
                self.misses += 1
                return self._eager(*tensors)
        results = [
            torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
            for shape, stride, dtype in self._made
        ]
        self.calls += 1
        fault = self._function(
            *[tensor.data_ptr() for tensor in tensors],
            *[result.data_ptr() for result in results],
            *self._extra,
            torch.get_num_threads() if self.is_parallel and os.getpid() == _PROCESS else 1,
        )
        if fault:
            return self._eager(*tensors)
        return results[0] if len(results) == 1 else tuple(results)
