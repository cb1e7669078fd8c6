"""Which calls a kernel can compute, wherever they stand.

`candidate` is asked for one node at a time. It answers with the node's operator, operands and
types, or raises `Unfusable` with the reason, in words for the person who reads the report.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import Attribute, Call, resolve
from fxkit.ir.types import TensorType, short_dtype, type_of
from fxkit.lower.fusion.view_map import is_alias
from fxkit.lower.loop_ir.index import row_major
from fxkit.lower.loop_ir.loop_ir import SUPPORTED, Unfusable
from fxkit.lower.operators import movement_ops, reduction_ops, scalar_ops
from fxkit.lower.operators.movement_table import MoveOp
from fxkit.lower.operators.reduction_ops import ReductionOp
from fxkit.lower.operators.scalar_table import ScalarOp

# Where kernels run; a region's policy says which of them it is for.
DEVICES = frozenset({"cpu", "cuda"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A call that a kernel may be able to compute.

    Attributes:
        node: The node.
        call: Its operator and arguments.
        entry: The entry of one of the three tables.
        operands: Operand name → node, attribute of the module, number, None, or a list of these.
        operand_types: The type of each of them that is a tensor.
        types: Type of each of its results.
    """

    node: fx.Node
    call: Call
    entry: ScalarOp | ReductionOp | MoveOp
    operands: Mapping[str, Any]
    operand_types: Mapping[fx.Node | Attribute, Any]
    types: tuple[TensorType, ...]

    @property
    def type(self) -> TensorType:
        """Type of its first result."""
        return self.types[0]

    @property
    def tensors(self) -> list[fx.Node | Attribute]:
        """The operands that are tensors."""
        return tensors_in(self.operands.values())

    def check_device(self, device: torch.device) -> None:
        """See that it computes on a device.

        Raises:
            Unfusable: When an operand or a result lies elsewhere.
        """
        for known in (*self.types, *self.operand_types.values()):
            if known.device != device:
                raise Unfusable(f"it reads or makes a tensor on {known.device}")

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes that the entry's function takes, by name."""
        names = self.entry.attributes
        return {n: self.call.arguments.get(n) for n in names if n in self.call.arguments}


def tensors_in(values: Iterable[Any]) -> list[fx.Node | Attribute]:
    """Return the tensors among operands, and in lists of operands."""
    found: list[fx.Node | Attribute] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += tensors_in(value)
        elif isinstance(value, (fx.Node, Attribute)):
            found.append(value)
    return found


def table_entry(call: Call, name: str | None = None) -> ScalarOp | ReductionOp | MoveOp | None:
    """Return the table's entry for a call; of an operator that has several, the one that serves."""
    name = reduction_ops.variant(call.name if name is None else name, _arguments(call))
    return (
        scalar_ops.TABLE.get(name) or reduction_ops.TABLE.get(name) or movement_ops.TABLE.get(name)
    )


def is_candidate(node: fx.Node) -> bool:
    """Tell whether a table has an entry for a node, or torch calls it pointwise.

    The report says of each such node in which region it is, or why in none.
    """
    call = resolve(node)
    if call is None or is_alias(node):
        return False
    if table_entry(call) or table_entry(call, call.name.removesuffix("_")):
        return isinstance(_first(type_of(node)), TensorType | None)
    overload = call.operator.overload
    return overload is not None and torch.Tag.pointwise in overload.tags


def candidate(node: fx.Node, root: torch.nn.Module, is_value: bool = False) -> Candidate:
    """Return a node as a candidate.

    Args:
        node: The node.
        root: The module that owns the graph.
        is_value: Whether an in-place call may be taken for one that makes a new value.

    Raises:
        Unfusable: When no kernel can compute it, wherever it stands.
    """
    call = resolve(node)
    entry = call and table_entry(call, call.name.removesuffix("_") if is_value else None)
    if call is None or entry is None:
        raise Unfusable(_no_entry(call))
    types = _results(node)
    arguments = dict(_arguments(call))
    if "self" in entry.operands and "input" in arguments:
        arguments["self"] = arguments.pop("input")
    if any(arguments.get(name) is not None for name in _OLD_FORMS):
        raise Unfusable("it is called in a form that eager alone serves")
    operands = {name: arguments.get(name) for name in entry.operands}
    known_types = {tensor: operand_type(tensor, root) for tensor in tensors_in(operands.values())}
    if isinstance(entry, MoveOp):
        for known in known_types.values():
            _check_type(known, "an operand", may_be_empty=entry.joins)
            if entry.in_order and known.stride != tuple(row_major(known.shape)):
                raise Unfusable("its operand does not lie row by row")
    else:
        _check_operands(operands, known_types)
    found = Candidate(node, Call(call.operator, arguments), entry, operands, known_types, types)
    if not known_types and not isinstance(entry, MoveOp):
        raise Unfusable("it has no tensor operand")
    if not set(node.all_input_nodes) <= known_types.keys():
        raise Unfusable("it takes an argument that is computed at run time")
    return found


def likeness(found: Candidate, tensors: Sequence[fx.Node | Attribute]) -> Hashable:
    """Return what candidates have in common that compute the same of operands of the same types.

    Args:
        found: A candidate.
        tensors: Its operands that are tensors, each once.
    """
    places = dict(zip(tensors, range(len(tensors)), strict=True))

    def shown(value: Any) -> Hashable:
        if isinstance(value, (list, tuple)):
            return type(value), *map(shown, value)
        if isinstance(value, (fx.Node, Attribute)):
            return places.get(value, value)
        return type(value), repr(value)

    given = found.call.arguments
    arguments = [
        (name, places[value] if isinstance(value, fx.Node) else shown(value))
        for name, value in given.items()
    ]
    types = map(found.operand_types.__getitem__, tensors)
    return id(found.entry), found.call.name, *arguments, *types, *found.types


def _check_operands(
    operands: Mapping[str, Any], known_types: Mapping[fx.Node | Attribute, Any]
) -> None:
    for name, value in operands.items():
        if isinstance(value, (fx.Node, Attribute)):
            _check_type(known_types[value], f"its operand {name}")
        elif value is not None and not isinstance(value, (bool, int, float)):
            raise Unfusable(f"its operand {name} is {type(value).__name__}")


def _results(node: fx.Node) -> tuple[TensorType, ...]:
    """Return the types of a node's results."""
    known = type_of(node)
    if not isinstance(known, tuple):
        _check_type(known, "its result")
        return (known,)
    for one in known:
        _check_type(one, "one of its results")
    if None in map(position_taken, node.users):
        raise Unfusable("its results are taken whole")
    return known


def position_taken(node: fx.Node) -> int | None:
    """Return which of an operator's results a node takes, or None when it does something else."""
    call = resolve(node)
    position = call.arguments.get("1") if call and call.name == "python.getitem" else None
    return position if type(position) is int else None


def _no_entry(call: Call | None) -> str:
    name = call.name if call else "it"
    if call and name.endswith("_") and table_entry(call, name.removesuffix("_")):
        return "it changes its operand in place"
    return f"the table of operators has no row for {name}"


# Parameters of Python functions: old ways to say how a loss is reduced.
_OLD_FORMS = ("size_average", "reduce")


def _arguments(call: Call) -> Mapping[str, Any]:
    """Return arguments by name, also for Python's indexing, which has no schema."""
    if call.name == "python.getitem":
        return {"self": call.arguments["0"], "key": call.arguments["1"]}
    return call.arguments


def _first(value_type: Any) -> Any:
    return value_type[0] if isinstance(value_type, tuple) and value_type else value_type


def operand_type(operand: fx.Node | Attribute, root: torch.nn.Module) -> Any:
    """Return the type of an operand."""
    if isinstance(operand, fx.Node):
        return type_of(operand)
    return TensorType.of(find_attribute(root, operand.path))


def _check_type(known: Any, what: str, may_be_empty: bool = False) -> None:
    if not isinstance(known, TensorType):
        given = "not known" if known is None else f"{type(known).__name__}, not a tensor"
        raise Unfusable(f"the type of {what} is {given}")
    if known.device.type not in DEVICES:
        raise Unfusable(f"{what} is on {known.device}")
    if known.dtype not in SUPPORTED:
        raise Unfusable(f"{what} is {short_dtype(known.dtype)}, which kernels do not compute")
    if known.stride is None:
        raise Unfusable(f"{what} is not strided")
    if not all(isinstance(size, int) for size in known.shape):
        raise Unfusable(f"the shape of {what} is symbolic")
    if known.numel == 0 and not may_be_empty:
        raise Unfusable(f"{what} has no elements")
