"""What a node costs: floating point operations and the bytes that it has to move at least.

The operations are counted by torch's own formulas (`torch.utils.flop_counter`) on the node's
recorded types; pointwise and reduction operators count one operation an element. What has no
formula is None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.effects import effects_of
from fxkit.analysis.operation_counts import MOVES, count
from fxkit.analysis.operator_mode import OperatorMode
from fxkit.analysis.tensor_types import fake_mode
from fxkit.ir.attributes import type_of_operand
from fxkit.ir.op import Call, resolve
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import TensorType, type_of
from fxkit.torch_adapters.dynamo_config import call_with_settings
from fxkit.torch_adapters.operators import packet_of, schema_of
from fxkit.torch_adapters.tensors import impl_address_of


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a node.

    Attributes:
        flops: Floating point operations, a multiply-add counted as two; None when not known.
        bytes: Bytes read and written when each operand is read once and each result written once;
            None when a type is not known, or a size is an expression.
    """

    flops: int | None
    bytes: int | None

    def __add__(self, other: Cost) -> Cost:
        flops = None if self.flops is None or other.flops is None else self.flops + other.flops
        size = None if self.bytes is None or other.bytes is None else self.bytes + other.bytes
        return Cost(flops, size)


FREE = Cost(0, 0)


def cost_of(node: fx.Node) -> Cost:
    """Return what a node costs; its types have to be known (`propagate_types`).

    Args:
        node: Any node. Placeholders, `get_attr`, the output, views and Python values are free.
    """
    call = resolve(node)
    if call is None or (call.name not in _FORMULAS and _is_free(node, call)):
        return FREE
    if not _is_sized(node, call):
        return Cost(None, None)
    if call.name in _INDEXING:
        return Cost(0, _indexed_bytes(node, call))
    return Cost(_flops(node, call), _bytes(node, call))


def _is_sized(node: fx.Node, call: Call) -> bool:
    """Tell whether no size of the result or of an operand is an expression."""
    operands = (type_of_operand(v, node.graph) for v in _leaves(list(call.arguments.values())))
    return is_sized([type_of(node), *operands])


def is_sized(known: Any) -> bool:
    """Tell whether a type, or several in a nested value, holds no expression for a number."""
    return all(
        not (leaf.is_symbolic if isinstance(leaf, TensorType) else isinstance(leaf, Symbol))
        for leaf in _leaves(known)
    )


FlopFormula = Callable[[fx.Node, Mapping[str, Any]], int]
"""Takes a call's node and the types of its arguments by name; returns operations."""

_FORMULAS: dict[str, FlopFormula] = {}


def flop_formula(operator: str) -> Callable[[FlopFormula], FlopFormula]:
    """Say how many operations an operator takes; a decorator.

    Args:
        operator: The operator's identity, such as `"mylib.fused_mlp"`.

    Example:
        >>> @flop_formula("mylib.fused_mlp")
        ... def count(node, types):
        ...     return 2 * types["x"].numel * types["weight"].shape[0]
    """

    def register(formula: FlopFormula) -> FlopFormula:
        _FORMULAS[operator] = formula
        return formula

    return register


def _by_formula(node: fx.Node, call: Call) -> int:
    types = {name: type_of_operand(v, node.graph) for name, v in call.arguments.items()}
    return _FORMULAS[call.name](node, types)


def _is_free(node: fx.Node, call: Call) -> bool:
    if call.name.startswith("python."):
        return not _moves_elements(node, call)
    known = type_of(node)
    if known is not None and not any(True for _ in _types_in(known)):
        return not call.operator.is_opaque
    effects = effects_of(node)
    return bool(effects.aliases) and effects.is_pure and _is_view(node, call)


_INDEXING = frozenset({"python.getitem", "python.setitem"})


def _moves_elements(node: fx.Node, call: Call) -> bool:
    """Tell whether Python's brackets copy: they write, or read at positions that tensors tell."""
    if call.name not in _INDEXING or not isinstance(_type_at(node, 0), TensorType):
        return False
    return call.name == "python.setitem" or any(_index_types(node))


def _type_at(node: fx.Node, position: int) -> Any:
    return type_of_operand(node.args[position], node.graph) if len(node.args) > position else None


def _index_types(node: fx.Node) -> list[TensorType]:
    index = node.args[1] if len(node.args) > 1 else None
    return list(_types_in([type_of_operand(v, node.graph) for v in _leaves([index])]))


def _indexed_bytes(node: fx.Node, call: Call) -> int | None:
    """Return the bytes of the indices, and of each element where it was and where it goes."""
    indices = sum(known.nbytes for known in _index_types(node))
    if call.name == "python.getitem":
        found = type_of(node)
        return 2 * found.nbytes + indices if isinstance(found, TensorType) else None
    base, index, value = (_empty(arg, node, _META) for arg in node.args[:3])
    try:
        with torch.no_grad():
            written = base[tuple(index) if isinstance(index, list) else index]
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None
    given = value.nbytes if isinstance(value, torch.Tensor) else 0
    return written.numel() * written.element_size() + given + indices


_META = torch.device("meta")

# Operators that declare an alias, and copy when they must.
_MAY_COPY = frozenset(
    f"aten.{name}" for name in "reshape reshape_as flatten ravel contiguous to type_as".split()
)


def copies(node: fx.Node) -> bool:
    """Tell whether a call that may return a view copies instead, by where its result lies.

    So may `reshape`, `flatten`, `contiguous` and `to`. Of sizes that are expressions it tells no.
    """
    call = resolve(node)
    base = type_of(node.all_input_nodes[0]) if node.all_input_nodes else None
    return call is not None and isinstance(base, TensorType) and _copies(call, node, base)


def _copies(call: Call, node: fx.Node, base: TensorType) -> bool:
    if call.name not in _MAY_COPY or base.stride is None or not is_sized(base):
        return False
    if base.is_contiguous and call.arguments.get("memory_format") is None:
        return False
    overload: Any = call.operator.overload
    if _devices(call, node) - {base.device}:
        return True
    try:
        with torch.no_grad():
            given = {key: _empty(value, node, _META) for key, value in call.arguments.items()}
            result = overload(**given)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    operand = given["self"]
    return impl_address_of(result.untyped_storage()) != impl_address_of(operand.untyped_storage())


def _is_view(node: fx.Node, call: Call) -> bool:
    """Tell whether the result is a view for sure: declared so, of the same dtype, and no copy."""
    base = next(iter(node.all_input_nodes), None)
    before, after = (type_of(base) if base is not None else None), type_of(node)
    overload = call.operator.overload
    if overload is None or not overload.is_view:
        return False
    if not isinstance(before, TensorType) or not isinstance(after, TensorType):
        return True
    return before.dtype == after.dtype and not _copies(call, node, before)


def _bytes(node: fx.Node, call: Call) -> int | None:
    result = type_of(node)
    if result is None:
        return None
    total = sum(t.nbytes for t in _types_in(result))
    for value in _leaves(list(call.arguments.values())):
        known = type_of_operand(value, node.graph)
        if isinstance(value, fx.Node) and known is None:
            return None
        total += sum(t.nbytes for t in _types_in(known))
    return min(total, _gathered_bytes(node, call, result, total))


# Operators that read only the elements that they return, and the indices that say which.
_GATHERS = frozenset({"aten.embedding", "aten.index_select", "aten.gather", "aten.index"})


def _gathered_bytes(node: fx.Node, call: Call, result: Any, otherwise: int) -> int:
    """Return the bytes of a lookup: the indices once, and each element twice."""
    if call.name not in _GATHERS:
        return otherwise
    known = (type_of_operand(v, node.graph) for v in _leaves(list(call.arguments.values())))
    indices = (t for t in _types_in(list(known)) if not t.dtype.is_floating_point)
    return 2 * sum(t.nbytes for t in _types_in(result)) + sum(t.nbytes for t in indices)


def _flops(node: fx.Node, call: Call) -> int | None:
    if call.name in _FORMULAS:
        return _by_formula(node, call)
    if call.name.startswith("guard."):
        return sum(t.numel for t in _types_in([type_of(o) for o in node.all_input_nodes]))
    overload = call.operator.overload
    if overload is None:
        return _counted_by_target(node)
    result = list(_types_in(type_of(node)))
    packet = call.name.removeprefix("aten.")
    if packet in MOVES:
        return 0
    if packet.startswith("_foreach_"):
        return sum(t.numel for t in _types_in(_list_types(call, node)))
    if torch.Tag.pointwise in overload.tags:
        return sum(t.numel for t in result) if result else None
    if torch.Tag.reduction in overload.tags:
        operand = type_of_operand(next(iter(call.arguments.values())), node.graph)
        return operand.numel if isinstance(operand, TensorType) else None
    return _counted(node, call)


def _list_types(call: Call, node: fx.Node) -> list[Any]:
    """Return the types of a call's first operand, which is a list of tensors."""
    first = next(iter(call.arguments.values()))
    return [type_of_operand(value, node.graph) for value in _leaves([first])]


def _counted(node: fx.Node, call: Call) -> int | None:
    """Run the operator on fake tensors under torch's counter."""
    overload: Any = call.operator.overload
    return _operations(lambda: overload(**{k: _empty(v, node) for k, v in call.arguments.items()}))


# Modules of torch whose functions compute values from their arguments, and nothing else.
_FUNCTIONS = ("torch.nn.functional", "torch.functional", "torch._jit_internal")


def _counted_by_target(node: fx.Node) -> int | None:
    """Run a function of torch that is no operator itself, but is made of some."""
    target: Any = node.target
    if node.op != "call_function" or getattr(target, "__module__", "") not in _FUNCTIONS:
        return None
    return _operations(
        lambda: target(
            *(_empty(arg, node) for arg in node.args),
            **{key: _empty(arg, node) for key, arg in node.kwargs.items()},
        )
    )


def _operations(call: Callable[[], Any]) -> int | None:
    """Count what a call does on fake tensors, without the import of TorchDynamo."""
    return call_with_settings(_operations_of, call)


def _operations_of(call: Callable[[], Any]) -> int | None:
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    counter = FlopCounterMode(display=False)
    try:
        with fake_mode(), torch.no_grad(), counter, _OperatorLog(flop_registry) as log:
            call()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return counter.get_total_flops() + log.elementwise if log.is_complete else None


class _OperatorLog(OperatorMode):
    """Sees the operators that a composite one is made of, and counts those without a formula."""

    def __init__(self, formulas: Any) -> None:
        super().__init__()
        self._formulas = formulas
        self.is_complete = True
        self.elementwise = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula_known = packet_of(func) in self._formulas
        if func.namespace == "aten" and not formula_known and not func.is_view:
            count = _elements(func, args, result)
            self.is_complete &= count is not None
            self.elementwise += count or 0
        return result


def _elements(func: Any, args: Any, result: Any) -> int | None:
    packet = f"aten.{schema_of(func).name.partition('::')[2]}"
    if torch.Tag.inplace_view in func.tags:
        return 0
    if packet == "aten._scaled_dot_product_flash_attention_for_cpu":
        query, key, value = args[:3]
        return _attention_flops(query.shape[:-2], query, key, value)
    tensors = [t for t in _leaves([result]) if isinstance(t, torch.Tensor)]
    if tensors:
        known = count(packet.removeprefix("aten.").removesuffix("_"), args, tensors[0])
        if known is not None:
            return known
    if torch.Tag.pointwise in func.tags and tensors:
        return tensors[0].numel()
    if torch.Tag.reduction in func.tags and args and isinstance(args[0], torch.Tensor):
        return args[0].numel()
    return None


@flop_formula("aten.scaled_dot_product_attention")
def _of_attention(node: fx.Node, types: Mapping[str, Any]) -> int:
    """Count both products, whichever kernel the sizes of the heads leave to torch."""
    batch = type_of(node).shape[:-2]
    return _attention_flops(batch, types["query"], types["key"], types["value"])


def _attention_flops(batch: Sequence[int], query: Any, key: Any, value: Any) -> int:
    """Count both products of `softmax(q k^T) v`; torch has no formula for its CPU kernel."""
    rows, width = query.shape[-2:]
    return 2 * math.prod(batch) * rows * key.shape[-2] * (width + value.shape[-1])


def _empty(value: Any, node: fx.Node, device: torch.device | None = None) -> Any:
    """Return an argument with an empty tensor for each one that it names.

    What runs on torch's device "meta" computes shapes and strides alone. So does what runs on fake
    tensors, with an import that takes longer than many programs are compiled.

    Args:
        value: The argument.
        node: The call.
        device: Where all tensors are to lie, and what any device is replaced by; none keeps them.
    """
    if isinstance(value, (list, tuple)):
        return [_empty(v, node, device) for v in value]
    if isinstance(value, torch.device):
        return device or value
    known = type_of_operand(value, node.graph)
    if isinstance(known, TensorType):
        where = device or known.device
        if known.stride is None:
            return torch.empty(known.shape, dtype=known.dtype, device=where)
        return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=where)
    return known if isinstance(value, fx.Node) else value


def _devices(call: Call, node: fx.Node) -> set[torch.device]:
    """Return the devices that a call names, and those of its operands."""
    values = list(_leaves(list(call.arguments.values())))
    named = {value for value in values if isinstance(value, torch.device)}
    known = (type_of_operand(value, node.graph) for value in values)
    return named | {it.device for it in _types_in(list(known))}


def _types_in(value: Any) -> Iterator[TensorType]:
    return (v for v in _leaves([value]) if isinstance(v, TensorType))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
