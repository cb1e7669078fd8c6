"""Guards on which tensors are the same object, or lie in the same memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxkit.torch_adapters.tensors import is_zero_tensor
from fxkit.tracing.guarding.guards import Guard, GuardedCall, Mismatch


@dataclass(frozen=True, slots=True)
class AliasGuard(Guard):
    """Which tensor arguments are one and the same object."""

    groups: tuple[int, ...]

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return groups_text(self.groups)

    def check(self, call: GuardedCall) -> Mismatch | None:
        groups = alias_groups(call.parts.tensors)
        return None if groups == self.groups else self._mismatch(groups_text(groups))


@dataclass(frozen=True, slots=True)
class OverlapGuard(Guard):
    """Which tensor arguments share memory; only where the program writes to one of them."""

    groups: tuple[int, ...]

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return groups_text(self.groups)

    def check(self, call: GuardedCall) -> Mismatch | None:
        groups = storage_groups(call.parts.tensors)
        return None if groups == self.groups else self._mismatch(groups_text(groups))


def alias_groups(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Return, for each tensor, the index of the first that is the same object."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors))


def storage_groups(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Return, for each tensor, the index of the first that lies in the same storage."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(storage_key(tensor), index) for index, tensor in enumerate(tensors)
    )


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors share when they share memory."""
    if tensor.layout is not torch.strided or is_zero_tensor(tensor):
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)


def groups_text(groups: tuple[int, ...]) -> str:
    """Return which tensors go together as text."""
    shared = [f"{index} with {first}" for index, first in enumerate(groups) if first != index]
    return "shared: tensor " + ", tensor ".join(shared) if shared else "all distinct"


@dataclass(frozen=True, slots=True)
class SameTensorGuard(Guard):
    """A tensor argument that is also a parameter, buffer or other tensor of the program."""

    index: int
    tensor: torch.Tensor
    place: str

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return self.place

    def check(self, call: GuardedCall) -> Mismatch | None:
        same = call.parts.tensors[self.index] is self.tensor
        return None if same else self._mismatch("another tensor")
