"""Record which functions of torch a Python function of torch calls, on fake tensors.

What `recording.record` sees are ATen's operators, into which linear layers and attention have
been taken apart. Here they are taken down as they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxkit.analysis.tensor_types import fake_mode, fake_value
from fxkit.ir.types import type_of_value
from fxkit.passes.decomposition.recording import OperatorRecording, RecordedStep, RecordedValue
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters import pytree

# What a Python function of torch asks before it computes: whether a mode wants to see it whole.
_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def record_calls(
    function: FunctionType, args: Any, kwargs: Any, types: Sequence[Any]
) -> OperatorRecording:
    """Run a Python function of torch on fake tensors, and return the functions that it called.

    Args:
        function: The function.
        args: Its operands; tensors as `RecordedValue(None, position)`.
        kwargs: Its keyword operands.
        types: A `TensorType` for each position.

    Raises:
        Unrecordable: When numbers decide, or a call is of a kind that is not taken down.
    """
    opened = FunctionType(
        function.__code__, {**function.__globals__, **dict.fromkeys(_QUESTIONS, _no)},
        function.__name__, function.__defaults__, function.__closure__,
    )  # fmt: skip
    opened.__kwdefaults__ = function.__kwdefaults__
    with fake_mode(), torch.no_grad():
        operands = [fake_value(known) for known in types]
        calls = _Calls(operands)
        given = pytree.tree_map_only(
            RecordedValue, lambda v: operands[v.index or 0], (args, kwargs)
        )
        try:
            with calls:
                result = opened(*given[0], **given[1])
            calls.recording.result = calls.marked(result)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError) as error:
            text = str(error).splitlines() or [type(error).__name__]
            raise Unrecordable(f"it can't run on types alone: {text[0]}") from error
    return calls.recording


def _no(*_: Any) -> bool:
    return False


class _Calls(TorchFunctionMode):
    def __init__(self, operands: Sequence[Any]) -> None:
        super().__init__()
        self.recording = OperatorRecording()
        self._values = {id(tensor): RecordedValue(None, n) for n, tensor in enumerate(operands)}
        self._kept: list[Any] = list(operands)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._take_down(func, args, kwargs, result)
        elif getattr(func, "__name__", "").startswith("__set"):
            raise Unrecordable("it writes into a part of a tensor")
        return result

    def _take_down(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            raise Unrecordable("it takes an attribute of a tensor")
        is_method = getattr(torch.Tensor, name, None) is func
        target = f".{name}" if is_method else func
        marked_args, marked_kwargs = self.marked((tuple(args), kwargs))
        step = RecordedStep(target, marked_args, marked_kwargs, type_of_value(result))
        position = len(self.recording.steps)
        self.recording.steps.append(step)
        several = isinstance(result, (tuple, list))
        for index, tensor in enumerate(result if several else [result]):
            self._kept.append(tensor)
            self._values[id(tensor)] = RecordedValue(position, index if several else None)

    def marked(self, value: Any) -> Any:
        """Return a nested value with its tensors named."""
        return pytree.tree_map_only(torch.Tensor, self._mark, value)

    def _mark(self, tensor: torch.Tensor) -> RecordedValue:
        if id(tensor) not in self._values:
            raise Unrecordable("a tensor comes from outside of the call")
        return self._values[id(tensor)]
