"""The call of a user's kernel in a lowered graph: by its address, as fxkit's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxkit.authoring.kernels.execution import InProcess
from fxkit.authoring.kernels.native import CallForm, NativeKernel
from fxkit.errors import BuildError
from fxkit.ir.types import TensorType
from fxkit.lower.runtime.kernel_call import KernelCall


class AuthoredCall(KernelCall):
    """Calls a user's kernel on tensors of the types that it was made for.

    Args:
        native: The kernel.
        form: How it is called.
        inputs: Types of its operands.
        operator: Computes the same for other types.
        numbers: The numbers that the operator takes, by position.
    """

    def __init__(
        self,
        native: NativeKernel,
        form: CallForm,
        inputs: Sequence[TensorType],
        operator: Callable[..., Any],
        numbers: dict[int, float | int],
    ) -> None:
        device = inputs[0].device
        outputs = [TensorType(s, d, stride, device) for s, stride, d in form.results]
        if native.arguments.has_workspace:
            outputs.append(TensorType((form.workspace,), torch.uint8, (1,), device))
        eager = _Eager(operator, numbers, form.workspace, native.arguments.has_workspace)
        super().__init__(native.arguments.signature.name, None, inputs, outputs, eager)
        self.work = sum(t.numel for t in (*inputs, *outputs))
        self.is_parallel = True  # the function itself knows when threads pay
        self.address = InProcess(native.path).address(form.function)
        self.parameters = form.numbers

    @property
    def may_fail(self) -> bool:
        """Whether the function may say that what it has written is void."""
        return True


class _Eager:
    def __init__(
        self,
        operator: Callable[..., Any],
        numbers: dict[int, float | int],
        workspace: int,
        has_workspace: bool,
    ) -> None:
        self._operator = operator
        self._numbers = numbers
        self._workspace = workspace
        self._has_workspace = has_workspace

    def __call__(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        count = len(tensors) + len(self._numbers)
        values = [self._numbers[i] if i in self._numbers else next(given) for i in range(count)]
        made = self._operator(*values)
        if not self._has_workspace:
            return made
        results = made if isinstance(made, tuple) else (made,)
        return (*results, torch.empty(self._workspace, dtype=torch.uint8))


def make_call(
    native: NativeKernel, operator: Callable[..., Any], values: Sequence[Any]
) -> AuthoredCall | None:
    """Return the call of a kernel for the types of its operands, and its numbers.

    Returns:
        None where it needs operands or results to be copied, or does not serve.
    """
    types = [value for value in values if isinstance(value, TensorType)]
    if any(t.device.type != "cpu" or t.is_symbolic or t.stride is None for t in types):
        return None
    form = native.form(dict(zip(native.captures, values, strict=True)))
    if form is None or not form.is_direct:
        return None
    numbers = {i: v for i, v in enumerate(values) if not isinstance(v, TensorType)}
    try:
        return AuthoredCall(native, form, types, operator, numbers)
    except BuildError:
        return None
