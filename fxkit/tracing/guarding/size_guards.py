"""Guards on tensors with dynamic sizes, and on relations between those sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.analysis.type_inference.symbolic_shapes import like_strides
from fxkit.ir.types import TensorType
from fxkit.tracing.guarding.guards import Guard, GuardedCall, Mismatch, tensor_text, type_text


@dataclass(frozen=True, slots=True)
class FreeTensorGuard(Guard):
    """The type of one tensor argument, but for the sizes of its free axes.

    Attributes:
        index: Which of the tensor arguments.
        kind: Its class.
        type: The type that it was captured with.
        shown: That type with expressions for the symbolic sizes.
        free: The free axes.
    """

    index: int
    kind: type
    type: TensorType
    shown: TensorType
    free: frozenset[int]

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return type_text(self.shown, self.kind)

    def check(self, call: GuardedCall) -> Mismatch | None:
        tensor, wanted = call.parts.tensors[self.index], self.type
        if (
            tensor.dtype is wanted.dtype
            and tensor.requires_grad == wanted.requires_grad
            and tensor.device == wanted.device
            and tensor.layout is torch.strided
            and type(tensor) is self.kind
            and self.has_shape(tensor.shape, tensor.stride())
        ):
            return None
        return self._mismatch(tensor_text(tensor))

    def has_type(self, found: TensorType) -> bool:
        """Tell whether a tensor of this type would do."""
        wanted = self.type
        same = found.dtype is wanted.dtype and found.device == wanted.device
        same = same and found.requires_grad == wanted.requires_grad
        return same and found.stride is not None and self.has_shape(found.shape, found.stride)

    def has_shape(self, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """Tell whether the other sizes are the same, and the elements lie as they did."""
        wanted = self.type
        if len(shape) != len(wanted.shape) or wanted.stride is None:
            return False
        if shape == wanted.shape and stride == wanted.stride:
            return True
        for axis, (size, expected) in enumerate(zip(shape, wanted.shape, strict=True)):
            if size != expected and axis not in self.free:
                return False
        return tuple(stride) == tuple(like_strides(wanted.shape, wanted.stride, shape))


@dataclass(frozen=True, slots=True)
class SizeGuard(Guard):
    """What has to hold of the symbolic sizes, as an expression.

    Attributes:
        text: The expression over the names of the sizes.
        names: What the user calls each of the sizes in it.
        places: For each, which tensor argument and which axis.
        function: Computes the expression.
    """

    text: str
    names: tuple[str, ...]
    places: tuple[tuple[int, int], ...]
    function: Callable[..., Any]

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return "true"

    def check(self, call: GuardedCall) -> Mismatch | None:
        tensors = call.parts.tensors
        sizes = [tensors[index].shape[axis] for index, axis in self.places]
        if self.holds(sizes):
            return None
        found = zip(self.names, sizes, strict=True)
        return self._mismatch("false for " + ", ".join(f"{name} = {size}" for name, size in found))

    def holds(self, sizes: list[int]) -> bool:
        """Tell whether it holds for some sizes, in the order of `places`."""
        try:
            return bool(self.function(*sizes))
        except ArithmeticError:
            return False

    def check_types(self, types: Sequence[TensorType]) -> bool:
        """Tell whether it holds for arguments of these types."""
        return self.holds([types[index].shape[axis] for index, axis in self.places])

    def describe(self) -> str:
        """Return the guard as a line of text."""
        return f"{self.what}  ({self.source})" if self.source else self.what
