"""A call of a backend in the place of a region, with the region itself to fall back on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx, nn

from fxkit.analysis.type_inference.type_facts import is_fake
from fxkit.ir.types import TensorType


class Backend(Protocol):
    """What `Partition` asks of a backend. It also reads two attributes where they are there.

    `name` is for messages and for the names of the submodules. `is_differentiable` tells whether
    autograd can follow what `compile` returns; without it, a call that needs a gradient runs the
    region itself.
    """

    def supports(self, node: fx.Node) -> str | None:
        """Return why the backend can't run a node, or None when it can."""
        ...

    def compile(self, region: fx.GraphModule, types: tuple[Any, ...]) -> Callable[..., Any]:
        """Return what runs a region: a callable with the region's inputs and outputs.

        Args:
            region: The nodes as a module. It shares its parameters with the whole module; they may
                be written to between two calls, so that a backend which copies them freezes them.
            types: A `TensorType` for each of its inputs, or None where it is not known.

        Raises:
            UnsupportedError: To refuse it; then its nodes stay as they are.
        """
        ...


class BackendCall(nn.Module):
    """Runs what a backend made of a region, or the region where that does not fit the call.

    A copy has a region of its own, and asks the backend to compile that.

    Args:
        region: The nodes that the backend takes.
        backend: Compiles them, at once.
        types: The types of the inputs; None where not known.

    Raises:
        UnsupportedError: When the backend refuses the region.
    """

    def __init__(self, region: fx.GraphModule, backend: Backend, types: tuple[Any, ...]) -> None:
        super().__init__()
        self.region = region
        self.backend = backend
        self.types = types
        # In a tuple: a module among it would become a submodule, with its parameters.
        self._compiled = (backend.compile(region, types),)
        self.training = region.training
        self._state = [(name, _key(t)) for name, t in _state_of(region)]

    def __deepcopy__(self, memo: dict[int, Any]) -> BackendCall:
        copied = BackendCall(copy.deepcopy(self.region, memo), self.backend, self.types)
        memo[id(self)] = copied
        return copied

    @property
    def compiled(self) -> Callable[..., Any]:
        """What the backend made of the region."""
        return self._compiled[0]

    def forward(self, *args: Any) -> Any:
        """Run the backend's callable if it fits these inputs, else the region.

        Types are told by the region: a kernel would look for memory that fake tensors don't have.
        """
        return self.region(*args) if self.explain(*args) else self.compiled(*args)

    def explain(self, *args: Any) -> str | None:
        """Return why a call with these inputs would run the region itself; None when it would not.

        Args:
            *args: Inputs of the region.
        """
        if any(map(_is_fake, args)):
            return "only its type is asked for"
        for index, (known, value) in enumerate(zip(self.types, args, strict=True)):
            if known is not None and not _fits(known, value):
                return f"input {index} is not {known}"
        if [(name, _key(t)) for name, t in _state_of(self.region)] != self._state:
            return "parameters or buffers were replaced"
        if not getattr(self.backend, "is_differentiable", False) and self._needs_gradient(args):
            return "a gradient is wanted, and the backend has none"
        return None

    def _needs_gradient(self, args: tuple[Any, ...]) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        return any(t.requires_grad for t in tensors) or any(
            p.requires_grad for p in self.region.parameters()
        )


def _is_fake(value: Any) -> bool:
    is_plain = type(value) is torch.Tensor or not isinstance(value, torch.Tensor)
    return not is_plain and is_fake(value)


def _state_of(region: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*region.named_parameters(), *region.named_buffers()]


def _key(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return tensor.dtype, tensor.device, tensor.shape


def _fits(known: Any, value: Any) -> bool:
    if not isinstance(known, TensorType):
        return type(known) is type(value) and known == value
    if not isinstance(value, torch.Tensor):
        return False
    sizes = zip(known.shape, value.shape, strict=False)
    return (
        value.dtype == known.dtype
        and value.device == known.device
        and value.dim() == len(known.shape)
        and all(not isinstance(k, int) or k == v for k, v in sizes)
    )
