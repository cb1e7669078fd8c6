"""Types of values in a graph: what is known of a tensor without its numbers.

A node's type lies in `node.meta["fxkit_type"]`. A capture that ran the program records it, and
`fxkit.analysis.tensor_types.propagate_types` works it out on fake tensors. What other tools left in
`node.meta["val"]` or `node.meta["tensor_meta"]` is read when ours is not there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.symbols import SYM_TYPES, Symbol, read_number
from fxkit.torch_adapters import pytree

KEY = "fxkit_type"

# Placeholders with equal values under this key of their `meta` share memory.
MEMORY_KEY = "fxkit_memory"

_SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b1",
}


_INT = frozenset({int})


@dataclass(frozen=True, slots=True)
class TensorType:
    """Everything about a tensor but its numbers.

    Attributes:
        shape: Size of each axis. A size is an int; under dynamic shapes, or where the data decide
            it, a `Symbol` (`fxkit.ir.symbols`).
        dtype: Element type.
        stride: Distance between neighbours along each axis, in elements; None if not known.
        device: Where the tensor lives.
        requires_grad: Whether autograd follows it.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype
    stride: tuple[Any, ...] | None
    device: torch.device
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        """Return the type of `tensor` (real, fake or meta)."""
        shape = tuple(tensor.shape)
        stride = tensor.stride() if tensor.layout == torch.strided else None
        if not {*map(type, shape), *map(type, stride or ())} <= _INT:
            shape = tuple(map(read_number, shape))
            stride = None if stride is None else tuple(map(read_number, stride))
        return cls(shape, tensor.dtype, stride, tensor.device, tensor.requires_grad)

    @property
    def is_symbolic(self) -> bool:
        """Whether a size is known as an expression only."""
        return any(isinstance(size, Symbol) for size in (*self.shape, *(self.stride or ())))

    @property
    def numel(self) -> Any:
        """Number of elements: an int, or a `Symbol`."""
        count: Any = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> Any:
        """Bytes that the elements take when they lie densely."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie densely in row-major order."""
        return self.stride is not None and self.stride == contiguous_stride(self.shape)

    @property
    def memory_format(self) -> torch.memory_format | None:
        """How the elements lie: contiguous, channels last, or None for anything else."""
        if self.is_contiguous:
            return torch.contiguous_format
        named = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(self.shape))
        if named is None or self.stride is None:
            return None
        batch, channels, *spatial = range(len(self.shape))
        order = (batch, *spatial, channels)
        dense = contiguous_stride(tuple(self.shape[axis] for axis in order))
        return named if dense == tuple(self.stride[axis] for axis in order) else None

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{','.join(str(size) for size in self.shape)}]"


def contiguous_stride(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the strides, in elements, that torch gives a fresh row-major tensor of this shape."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size if isinstance(size, Symbol) else max(size, 1)
    return tuple(reversed(strides))


def broadcast_shape(*shapes: Iterable[int]) -> tuple[int, ...]:
    """Return the shape that numbers of these shapes have together.

    torch's own function imports what torch does symbolic sizes with, for a third of a second.

    Args:
        *shapes: Shapes without expressions.

    Raises:
        RuntimeError: When they do not fit together.
    """
    reversed_shapes = [tuple(shape)[::-1] for shape in shapes]
    joint: list[int] = []
    for sizes in itertools.zip_longest(*reversed_shapes, fillvalue=1):
        wider = {size for size in sizes if size != 1}
        if len(wider) > 1:
            given = ", ".join(str(shape[::-1]) for shape in reversed_shapes)
            raise RuntimeError(f"expected shapes that fit together, got {given}")
        joint.append(wider.pop() if wider else 1)
    return tuple(reversed(joint))


def short_dtype(dtype: torch.dtype) -> str:
    """Return the short spelling of a dtype: `f32`, `bf16`, `i64`, `b1`."""
    return _SHORT_DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def type_of_value(value: Any) -> Any:
    """Replace each tensor in a nested value by its `TensorType`; leave all else as it is."""
    if isinstance(value, torch.Tensor):
        return TensorType.of(value)
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return pytree.tree_map_only((torch.Tensor, *SYM_TYPES), _type_of_leaf, value)


def _type_of_leaf(value: Any) -> Any:
    return TensorType.of(value) if isinstance(value, torch.Tensor) else read_number(value)


def type_of(node: fx.Node) -> Any:
    """Return what is known of a node's value.

    Returns:
        A `TensorType`; for several results a tuple, list or dict of them; for a Python value that
        is known, that value; None when nothing is known.
    """
    meta = node.meta
    return meta[KEY] if KEY in meta else type_by_others(node)


def requires_grad(node: fx.Node) -> bool:
    """Tell whether a node is known to give a tensor that autograd follows."""
    known = type_of(node)
    return isinstance(known, TensorType) and known.requires_grad


def type_by_others(node: fx.Node) -> Any:
    """Return what other tools than fxkit recorded of a node's value, in the form of `type_of`."""
    meta = node.meta
    if "val" in meta:
        return type_of_value(meta["val"])
    recorded = meta.get("tensor_meta")
    if recorded is None:
        return None
    if hasattr(recorded, "dtype"):
        return _from_tensor_metadata(recorded)
    return pytree.tree_map_only(
        object, _from_tensor_metadata, recorded, is_leaf=lambda leaf: hasattr(leaf, "dtype")
    )


def set_type(node: fx.Node, value_type: Any) -> None:
    """Record a node's type, as `type_of` returns it."""
    node.meta[KEY] = value_type


def _from_tensor_metadata(recorded: Any) -> Any:
    if not hasattr(recorded, "dtype"):
        return recorded
    return TensorType(
        tuple(recorded.shape),
        recorded.dtype,
        tuple(recorded.stride),
        torch.device("cpu"),
        recorded.requires_grad,
    )
