"""Indexing of tensors, as Python does it, spelled as ATen's operators.

Numbers that are computed in the graph stay: `x[:, :n]` is `aten.slice(x, 1, None, n)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxkit.analysis.shared_memory import holds_numbers
from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.decomposition.unrecordable import Unrecordable

_aten = torch.ops.aten

# Lists of more items are positions, whatever they hold.
_MOST_ITEMS = 32


@dataclass
class _Indexed:
    """A tensor with the part of an index applied that makes views, and the tensors that remain."""

    edit: EditSession
    before: fx.Node
    node: fx.Node
    indices: list[fx.Node | None] = field(default_factory=list)
    axis: int = 0

    def apply(self, item: Any) -> None:
        """Apply one item of an index to the next axis."""
        if item is None:
            self._call(_aten.unsqueeze.default, self.axis)
            self.axis += 1
        elif isinstance(item, slice):
            if (item.start, item.stop, item.step) != (None, None, None):
                self._call(_aten.slice.Tensor, self.axis, *_bounds(item))
            self.axis += 1
        elif _is_number(item):
            self._call(_aten.select.int, self.axis, item)
        else:
            self._pick(item)

    def _pick(self, item: Any) -> None:
        """Keep a tensor of positions for the end; a single position is a number."""
        if isinstance(item, (list, tuple)) and holds_numbers(item):
            tensor = torch.tensor(list(item))
            self._record(self.edit.add_attribute("_constant", tensor, before=self.before))
            return
        known = type_of(item) if isinstance(item, fx.Node) else None
        if not isinstance(item, fx.Node) or not isinstance(known, TensorType):
            raise Unrecordable(f"it is indexed by {item!r}")
        if not known.shape and not known.dtype.is_floating_point and known.dtype != torch.bool:
            position = self.edit.call(_aten._local_scalar_dense.default, item, before=self.before)
            self._call(_aten.select.int, self.axis, position)
            return
        if known.dtype in (torch.bool, torch.uint8) and len(known.shape) != 1:
            raise Unrecordable(f"it is indexed by {known} together with more")
        self._record(item)

    def _record(self, item: fx.Node) -> None:
        self.indices += [None] * (self.axis - len(self.indices))
        self.indices.append(item)
        self.axis += 1

    def take_whole(self, mask: fx.Node) -> None:
        """Index by one mask over several axes."""
        self.indices = [mask]

    def _call(self, overload: Any, *args: Any) -> None:
        self.node = self.edit.call(overload, self.node, *args, before=self.before)
        infer_type(self.node)


def read(edit: EditSession, tensor: fx.Node, index: Any, before: fx.Node) -> fx.Node:
    """Insert what `tensor[index]` computes.

    Args:
        edit: The session.
        tensor: A node whose type is known.
        index: What stands in the brackets, with nodes.
        before: Where to insert.

    Raises:
        Unrecordable: When it is indexed by something of which not enough is known.
    """
    indexed = _indexed(edit, tensor, index, before)
    if indexed.indices:
        return edit.call(_aten.index.Tensor, indexed.node, indexed.indices, before=before)
    if indexed.node is tensor:
        return edit.call(_aten.alias.default, tensor, before=before)
    return indexed.node


def write(edit: EditSession, tensor: fx.Node, index: Any, value: Any, before: fx.Node) -> None:
    """Insert what `tensor[index] = value` does.

    Raises:
        Unrecordable: When it is indexed by something of which not enough is known.
    """
    indexed = _indexed(edit, tensor, index, before)
    target, is_number = indexed.node, _is_number(value) or isinstance(value, (bool, float, complex))
    if indexed.indices:
        if is_number:
            value = _number_as_tensor(edit, value, tensor, before)
        else:
            value = _without_leading_ones(edit, value, None, before)
        made = edit.call(_aten.index_put_.default, target, indexed.indices, value, before=before)
    elif is_number or (isinstance(value, fx.Node) and isinstance(type_of(value), (float, bool))):
        made = edit.call(_aten.fill_.Scalar, target, value, before=before)
    else:
        value = _without_leading_ones(edit, value, target, before)
        made = edit.call(_aten.copy_.default, target, value, before=before)
    infer_type(made)


def _indexed(edit: EditSession, tensor: fx.Node, index: Any, before: fx.Node) -> _Indexed:
    items = list(index) if isinstance(index, tuple) or _is_taken_for_tuple(index) else [index]
    known = type_of(tensor)
    indexed = _Indexed(edit, before, tensor)
    if len(items) == 1 and _is_mask_over_several(items[0]):
        indexed.take_whole(items[0])
        return indexed
    for item in _without_ellipsis(items, len(known.shape)):
        indexed.apply(item)
    return indexed


def _is_taken_for_tuple(index: Any) -> bool:
    """Tell whether torch takes a list for the tuple of its items, with a warning, as it does yet.

    Source: torch/csrc/autograd/python_variable_indexing.cpp, `treatSequenceAsTuple`.
    """
    if not isinstance(index, list) or len(index) >= _MOST_ITEMS:
        return False
    return any(
        item is None
        or item is Ellipsis
        or isinstance(item, (list, tuple, slice))
        or (isinstance(item, fx.Node) and isinstance(type_of(item), TensorType))
        for item in index
    )


def _without_ellipsis(items: Sequence[Any], rank: int) -> list[Any]:
    """Return the items with as many full slices as the dots stand for."""
    if any(isinstance(item, bool) for item in items):
        raise Unrecordable("it is indexed by True or False")
    taken = sum(1 for item in items if item is not None and item is not Ellipsis)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    if at is None:
        return list(items)
    full = [slice(None)] * (rank - taken)
    return [*items[:at], *full, *items[at + 1 :]]


def _is_mask_over_several(item: Any) -> bool:
    known = type_of(item) if isinstance(item, fx.Node) else None
    if not isinstance(known, TensorType) or known.dtype not in (torch.bool, torch.uint8):
        return False
    return len(known.shape) > 1


def _is_number(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return isinstance(type_of(value), (int, torch.SymInt))
    return type(value) is int


def _bounds(item: slice) -> list[Any]:
    """Return a slice's bounds and step as operands, without a step of one."""
    step = [] if item.step is None or item.step == 1 else [item.step]
    return [item.start, item.stop, *step]


def _number_as_tensor(edit: EditSession, value: Any, like: fx.Node, before: fx.Node) -> fx.Node:
    made = edit.call(_aten.new_full.default, like, [], value, before=before)
    infer_type(made)
    return made


def _without_leading_ones(
    edit: EditSession, value: Any, target: fx.Node | None, before: fx.Node
) -> Any:
    """Drop the axes of length one in front, which assignment allows beyond the target's rank."""
    known = type_of(value) if isinstance(value, fx.Node) else None
    if not isinstance(known, TensorType):
        raise Unrecordable(f"{value!r} is assigned to a part of it")
    sizes = list(known.shape)
    rank = 0 if target is None else len(type_of(target).shape)
    if target is not None and len(sizes) <= rank:
        return value
    while sizes and type(sizes[0]) is int and sizes[0] == 1:
        sizes.pop(0)
    if len(sizes) == len(known.shape):
        return value
    made = edit.call(_aten.view.default, value, sizes, before=before)
    infer_type(made)
    return made
