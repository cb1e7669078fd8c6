"""A GPU kernel as a Python callable on tensors."""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxkit.ir.types import TensorType
from fxkit.lower.codegen.cuda.printer import scratch_bytes
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime.kernel_call import KernelCall, stores_its_values
from fxkit.lower.runtime.launcher import launcher_for

_TENSORS = (torch.Tensor, torch.nn.Parameter)


class CudaCall(KernelCall):
    """Launches a kernel on torch's current stream; runs eager on tensors of other types.

    It waits for nothing. Memory comes from torch's allocator, scratch memory too, which later work
    on the same stream may reuse.

    Args:
        name: Name in the generated code.
        kernel: What it computes.
        inputs: Types of the tensors it is called with.
        outputs: Types of the tensors it returns.
        eager: Computes the same with torch, from the same tensors.
    """

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        inputs: Sequence[TensorType],
        outputs: Sequence[TensorType],
        eager: Callable[..., Any],
    ) -> None:
        super().__init__(name, kernel, inputs, outputs, eager)
        self._device = outputs[0].device
        self.scratch_bytes = scratch_bytes(kernel)
        self._pointers = ctypes.c_void_p * len(kernel.buffers)

    def bind(self, library: ctypes.CDLL, name: str, parameters: bytes = b"") -> None:
        """Take the built function of this name, which reads no parameters at run time."""
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        function.restype = ctypes.c_int
        self._function = function
        self.launcher = launcher_for(self._device)
        if self.launcher is not None:
            self.address = ctypes.cast(function, ctypes.c_void_p).value

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._function is None:
            return self.in_eager(*tensors)
        if not all(map(self._fits, tensors, self.inputs)):
            self.misses += 1
            return self.in_eager(*tensors)
        with torch.cuda.device(self._device):
            results = [
                torch.empty_strided(t.shape, t.stride or (), dtype=t.dtype, device=self._device)
                for t in self.outputs
            ]
            error = self._launch([*tensors, *results])
        if error:
            _warn_once(error)
            self._function = None
            return self.in_eager(*tensors)
        self.calls += 1
        return results[0] if len(results) == 1 else tuple(results)

    def _launch(self, tensors: list[torch.Tensor]) -> int:
        """Launch the kernel on tensors of its device, and return CUDA's error, 0 for none."""
        scratch = None
        if self.scratch_bytes:
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=self._device)
        return self._function(
            self._pointers(*[tensor.data_ptr() for tensor in tensors]),
            None if scratch is None else scratch.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
            self._device.index,
        )

    def _fits(self, tensor: torch.Tensor, known: TensorType) -> bool:
        return (
            type(tensor) in _TENSORS
            and tensor.dtype is known.dtype
            and tensor.shape == known.shape
            and tensor.device == known.device
            and tensor.layout is torch.strided
            and tensor.stride() == known.stride
            and stores_its_values(tensor)
        )


@functools.cache
def _warn_once(error: int) -> None:
    warnings.warn(
        f"expected a kernel that can be launched, got CUDA's error {error}\n"
        "  Its region runs in eager.",
        stacklevel=4,
    )
