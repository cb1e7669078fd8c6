"""What a recorder notes beside the nodes of its graph."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import has_side_effect

from fxkit.analysis.type_inference.declared_types import declare_type
from fxkit.ir.types import TensorType, type_of_value
from fxkit.torch_adapters.tensors import impl_address_of
from fxkit.tracing.bytecode.value_flow import Flow
from fxkit.tracing.recorder.state_restore import Mutations
from fxkit.tracing.values.sources import ValueSource


@dataclass(slots=True)
class TracedValue:
    """A tensor of the running program, and where the graph has it."""

    tensor: torch.Tensor
    node: fx.Node
    path: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Outside:
    """A tensor that the program did not get as an argument and that the graph refers to."""

    target: str
    tensor: torch.Tensor
    places: tuple[ValueSource, ...]
    type: TensorType
    node: fx.Node


@dataclass(slots=True)
class Read:
    """A Python value that the program read out of a tensor."""

    check: fx.Node
    what: str
    expected: Any


@dataclass(frozen=True, slots=True)
class OpaqueCall:
    """A call that stays in a graph as it is.

    Attributes:
        name: What is called.
        source: The user's line that calls it, or None.
        reason: Why it can't be looked into.
    """

    name: str
    source: str | None
    reason: str

    def __str__(self) -> str:
        text = f"{self.name}: {self.reason}"
        return f"{text}\n  from:  {self.source}" if self.source else text


@dataclass(slots=True)
class ExportedCall:
    """An array that shares its memory with a tensor, and what was in it when it was made."""

    array: np.ndarray
    copy: np.ndarray
    tensor: torch.Tensor
    version: int | None


@dataclass(slots=True)
class Progress:
    """What has happened so far that matters to the calls that follow."""

    random: list[torch.Tensor]
    python: tuple[Any, Any]
    drew: bool = False
    raised: BaseException | None = None
    before_guard: Mutations = field(default_factory=Mutations)


def python_random_states() -> tuple[Any, Any]:
    """Return the states of the generators of Python and NumPy."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest)


def same_bytes(some: np.ndarray, other: np.ndarray) -> bool:
    """Tell whether two arrays are equal bit by bit, NaN too."""
    return some.tobytes() == other.tobytes()


@functools.lru_cache(maxsize=1024)
def application_of(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function that applies a custom autograd function, under the name of its class."""
    return own_application_of(kind)


def own_application_of(kind: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return another such function at each call."""

    def call(*args: Any) -> Any:
        return kind.apply(*args)

    call.__name__ = kind.__name__
    call.__qualname__, call.__module__ = kind.__qualname__, kind.__module__
    return call


def declare_result(target: Any, result: Any) -> None:
    """Let type inference know what a node with some target gives."""
    kind = type_of_value(result)
    declare_type(has_side_effect(target))(lambda *args, **kwargs: kind)


def memory_of(tensor: torch.Tensor) -> Any:
    """Return what tells the memory of a tensor; of one without plain memory, itself."""
    return (
        impl_address_of(tensor.untyped_storage()) if tensor.layout == torch.strided else id(tensor)
    )


def holds_tensor(value: Any) -> bool:
    """Tell whether there is a tensor in a nested value."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(map(holds_tensor, value.values()))
    return isinstance(value, (tuple, list)) and any(map(holds_tensor, value))


def needs_grad(value: Any) -> bool:
    """Tell whether a value is a tensor that autograd follows."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def may_be_object(result: Any, flow: Flow, kept: dict[int, Any]) -> bool:
    """Tell whether only opaque calls will see what an opaque call gave.

    Args:
        result: What it gave.
        flow: What the program does with it.
        kept: The objects that are older than the call.
    """
    if result is None or type(result) is bool or holds_tensor(result):
        return False
    if id(result) in kept or flow.computes or flow.returns:
        return False
    return not flow.enters or isinstance(result, io.IOBase)
