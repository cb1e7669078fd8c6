"""Kernels of authored operators as eager calls them: one build for all sizes and numbers."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fxkit import config
from fxkit.authoring.operators.composed import aligned, composed
from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.kernel_form import kernel_for, types_of_results
from fxkit.ir.types import TensorType
from fxkit.lower.building.build import Library
from fxkit.lower.compiling.kernel_builds import build_kernels
from fxkit.lower.cpp_printer import print_kernel
from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.loop_ir import SUPPORTED, Kernel, Unfusable
from fxkit.lower.loop_ir.runtime_parameters import (
    fully_parametrised,
    is_runtime,
    packed_parameters,
    parametrised,
    split_parameters,
)
from fxkit.lower.runtime import binding
from fxkit.lower.runtime.kernel_call import KernelCall
from fxkit.lower.runtime.type_specs import is_plain, spec_of

# So many types of operands are remembered for each operator.
_MAX_CALLS = 256

_LONG_WORK = 100_000

_lock = threading.RLock()
_libraries: dict[str, Library] = {}


@dataclass
class EagerKernels:
    """The kernels of one operator.

    Attributes:
        definition: What it computes.
        reason: Why torch computed the last call that no kernel did, or None.
        builds: How many kernels were asked of a compiler or its cache.
    """

    definition: Definition
    reason: str | None = None
    builds: int = 0
    _calls: dict[Hashable, KernelCall | None] = field(default_factory=dict)

    def call(
        self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Number]
    ) -> tuple[torch.Tensor, ...]:
        """Compute the operator, by a kernel if there is one for such tensors, else by torch."""
        call = self.kernel_call(tensors, numbers)
        if call is None:
            return composed(self.definition, tensors, numbers)
        found = call(*tensors)
        return found if isinstance(found, tuple) else (found,)

    def kernel_call(
        self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Number]
    ) -> KernelCall | None:
        """Return the kernel for such tensors; None where torch computes the call."""
        if not all(t.is_cpu and t.layout is torch.strided for t in tensors):
            return None
        key = (
            tuple((t.dtype, t.shape, t.stride()) for t in tensors),
            tuple((type(value), value) for value in numbers.values()),
            torch.get_default_dtype(),
        )
        with _lock:
            if key not in self._calls:
                if len(self._calls) >= _MAX_CALLS:
                    self._calls.pop(next(iter(self._calls)))
                self._calls[key] = self._made(tensors, dict(numbers))
            return self._calls[key]

    def program(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Number]) -> Any | None:
        """Return a callable of such tensors that answers with the binding's `MISS` for others."""
        call = self.kernel_call(tensors, numbers)
        native = binding.load()
        if call is None or native is None or call.address is None:
            return None
        if not all(map(is_plain, (*call.inputs, *call.outputs))):
            return None
        return _program(native, call, self.definition.is_tuple)

    def _made(
        self, tensors: Sequence[torch.Tensor], numbers: dict[str, Number]
    ) -> KernelCall | None:
        if config.current().backend == "eager":
            return None
        for tensor in tensors:
            if tensor.dtype not in SUPPORTED:
                self.reason = f"kernels do not compute {tensor.dtype}"
                return None
        outputs = types_of_results(self.definition, tensors, numbers)
        if not all(math.prod(each.shape) for each in (*tensors, *outputs)):
            return None
        if self.definition.rows is not None and _has_rows_of_one(self.definition, tensors):
            self.reason = "its rows have one element"
            return None
        try:
            kernel = kernel_for(self.definition, tensors, numbers, outputs)
        except Unfusable as error:
            self.reason = error.message
            return None
        return self._bound(kernel, tensors, numbers, outputs)

    def _bound(
        self,
        kernel: Kernel,
        tensors: Sequence[torch.Tensor],
        numbers: dict[str, Number],
        outputs: list[TensorType],
    ) -> KernelCall | None:
        open_ = _opened(kernel)
        library = self._library(open_)
        if library is None:
            return None

        def eager(*operands: torch.Tensor) -> Any:
            first, *more = composed(self.definition, operands, numbers)
            return (first, *more) if more else first

        inputs = [TensorType.of(tensor) for tensor in tensors]
        call = KernelCall(self.definition.name, kernel, inputs, outputs, eager)
        call.bind(library.handle, _NAME, packed_parameters(open_))
        return call

    def _library(self, kernel: Kernel) -> Library | None:
        text = print_kernel(kernel, _NAME)
        if text not in _libraries:
            self.builds += 1
            built = build_kernels({_NAME: kernel})
            if _NAME not in built.libraries:
                self.reason = str(built.failures[_NAME])
                return None
            _libraries[text] = built.libraries[_NAME]
        return _libraries[text]


_NAME = "kernel"


def _has_rows_of_one(definition: Definition, tensors: Sequence[torch.Tensor]) -> bool:
    return all(t.shape[-1] == 1 for t in aligned(definition, tensors))


def _opened(kernel: Kernel) -> Kernel:
    """Return a kernel that reads its sizes and strides at run time, and keeps its constants."""
    details = [i.detail.value for i in fully_parametrised(kernel).body if i.op == "const"]
    constants = {int(value.text[1:]) for value in details if is_runtime(value)}
    return parametrised(kernel, frozenset(range(len(split_parameters(kernel)[1]))) - constants)


def _program(native: Any, call: KernelCall, is_tuple: bool) -> Any:
    inputs = tuple(map(spec_of, call.inputs))
    outputs = tuple(map(spec_of, call.outputs))
    ins = tuple(range(len(inputs)))
    outs = tuple(range(len(inputs), len(inputs) + len(outputs)))

    def in_python(owner: Any, box: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found = call.in_eager(*box)
        return found if isinstance(found, tuple) else (found,)

    is_long = call.work >= _LONG_WORK
    kernels = ((call.address, ins + outs, call.is_parallel, call.parameters, (), -1),)
    run = (inputs, (), outputs, 0, (), (), kernels, is_long, None)
    step = (in_python, None, ins, outs, (), run)
    slots = len(inputs) + len(outputs)
    return native.Program(inputs, slots, (), (), True, (step,), outs, not is_tuple)
