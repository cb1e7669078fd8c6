"""What a node does besides computing its value: writes, aliases, random numbers, unknown calls.

Effects come from the operator's schema: an argument marked as written is written, a result marked
with an argument's alias set may share its memory, the tag for seeded randomness says what it says.
What no schema tells is assumed to have every effect.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fxkit.ir.attributes import ABSENT, find_attribute, find_attributes
from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.op import Attribute, Call, Operator, operator_of, operator_of_overload, resolve
from fxkit.ir.op_table import FRESH_RESULTS, MODE_FUNCTIONS, UNDECLARED_ALIASES
from fxkit.ir.types import MEMORY_KEY, TensorType, type_of
from fxkit.torch_adapters.fx_nodes import order_key
from fxkit.torch_adapters.graph_surgery import nodes_by_target
from fxkit.torch_adapters.operators import schema_of
from fxkit.torch_adapters.tensors import impl_address_of


@dataclass(frozen=True, slots=True)
class Effects:
    """What a node does besides computing its value.

    Attributes:
        writes: Operands whose memory it changes; module parameters and buffers as `Attribute`.
        aliases: Operands whose memory its result may share.
        is_random: Whether it draws from a random number generator.
        is_opaque: Whether nothing is known of it; then it may do anything.
        is_global: Whether it changes or reads a global mode (grad, autocast) or state.
        may_raise: Whether it is there to raise when something does not hold, or, returning nothing,
            for what else it does.
    """

    writes: tuple[fx.Node | Attribute, ...] = ()
    aliases: tuple[fx.Node, ...] = ()
    is_random: bool = False
    is_opaque: bool = False
    is_global: bool = False
    may_raise: bool = False

    @property
    def is_pure(self) -> bool:
        """Whether the node may be dropped when nobody uses it, moved, and merged with its equal."""
        return not (
            self.writes or self.is_random or self.is_opaque or self.is_global or self.may_raise
        )

    def describe(self) -> str:
        """Return the effects in words; "pure" when there are none."""
        parts = []
        if self.writes:
            names = [w.path if isinstance(w, Attribute) else f"%{w.name}" for w in self.writes]
            parts.append(f"writes {', '.join(names)}")
        if self.is_random:
            parts.append("draws random numbers")
        if self.is_global:
            parts.append("changes a global mode")
        if self.may_raise:
            parts.append("raises when its operand is not as expected")
        if self.is_opaque:
            parts.append("may do anything: nothing is known of it")
        return "; ".join(parts) or "pure"


PURE = Effects()


def effects_of(node: fx.Node) -> Effects:
    """Return the effects of one node.

    Args:
        node: Any node. Placeholders, `get_attr` and the output have none of their own.
    """
    operator = operator_of(node)
    if operator is None or _is_always_pure(operator):
        return PURE
    call = resolve(node)
    assert call is not None
    if call.operator.overload is None:
        return _without_schema(node, call)
    effects = _from_schema(node, call)
    if call.name in CONVERSIONS and _has_new_dtype(node, call):
        effects = replace(effects, aliases=())
        return PURE if effects == PURE else effects
    return effects


# They give back their operand where it has the dtype asked for already.
CONVERSIONS = frozenset({"aten.to", "aten.type_as"})


def _has_new_dtype(node: fx.Node, call: Call) -> bool:
    """Tell whether a conversion is known to change the dtype, so that it makes a new tensor."""
    operand = call.arguments.get("self")
    known = type_of(operand) if isinstance(operand, fx.Node) else None
    made = type_of(node)
    if not (isinstance(known, TensorType) and isinstance(made, TensorType)):
        return False
    return known.dtype != made.dtype


def all_pure(graph: fx.Graph) -> bool:
    """Tell whether no node of a graph has an effect, or a result that may share memory.

    Cost: linear in the distinct ATen overloads that the graph calls, and in its other calls.
    """
    for (kind, target), nodes in nodes_by_target(graph):
        if not nodes or kind in COMPUTES_NOTHING:
            continue
        operator = operator_of_overload(target)
        if operator is not None and _is_always_pure(operator):
            continue
        if any(effects_of(node) is not PURE for node in nodes):
            return False
    return True


@functools.cache
def _is_always_pure(operator: Operator) -> bool:
    """Tell whether no call of an operator has an effect or an alias: true of most of them."""
    if operator.overload is None or operator.name in UNDECLARED_ALIASES:
        return False
    base = _schema_effects(operator.overload)
    names = {argument.name for argument in operator.schema.arguments}
    may_update = _updates_undeclared(operator.name) and bool(
        names & {"training", "use_input_stats"}
    )
    is_inert = not (base.written or base.aliased or base.is_random or base.may_do_more)
    return is_inert and not (base.returns_nothing or may_update)


def _without_schema(node: fx.Node, call: Call) -> Effects:
    operands = tuple(node.all_input_nodes)
    namespace, _, name = call.name.partition(".")
    if call.operator.is_opaque:
        changes_mode = call.name.rpartition(".")[2] in MODE_FUNCTIONS
        return Effects(operands, operands, True, is_opaque=True, is_global=changes_mode)
    if namespace in ("guard", "effect"):
        return Effects(may_raise=True)
    if namespace == "functional":
        return Effects(is_random=_is_random(call.arguments["0"]))
    if namespace == "python" and (name in _WRITING_PYTHON or name in _INPLACE_PYTHON):
        is_copied = name in _WRITING_PYTHON and isinstance(type_of(operands[0]), TensorType)
        return Effects(writes=operands[:1], aliases=operands[:1] if is_copied else operands)
    return Effects(aliases=operands)


def _is_random(overload: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags


# Item assignment, and `operator.iadd` and its like on what may be a list.
_WRITING_PYTHON = frozenset({"setitem"})
_INPLACE_PYTHON = frozenset(
    """
    iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift iconcat
    """.split()
)


@dataclass(frozen=True, slots=True)
class _SchemaEffects:
    written: tuple[str, ...]
    aliased: tuple[str, ...]
    is_random: bool
    may_do_more: bool
    returns_nothing: bool


@functools.cache
def _schema_effects(overload: Any) -> _SchemaEffects:
    arguments = schema_of(overload).arguments
    infos = [(a.name, a.alias_info) for a in arguments if a.alias_info is not None]
    returns_alias = any(r.alias_info is not None for r in schema_of(overload).returns)
    return _SchemaEffects(
        written=tuple(name for name, info in infos if info.is_write),
        aliased=tuple(name for name, info in infos if returns_alias or info.is_write),
        is_random=_is_random(overload),
        may_do_more=torch.Tag.maybe_aliasing_or_mutating in overload.tags,
        returns_nothing=not schema_of(overload).returns,
    )


def _from_schema(node: fx.Node, call: Call) -> Effects:
    base = _schema_effects(call.operator.overload)
    arguments = call.arguments
    written = [w for name in base.written for w in _tensors_in(arguments[name])]
    aliased = [a for name in base.aliased for a in _nodes_in(arguments[name])]
    is_random = base.is_random and not _is_random_off(arguments)
    may_alias = base.may_do_more and call.name not in FRESH_RESULTS
    if may_alias or (call.name in UNDECLARED_ALIASES and not _contracts(call)):
        aliased.extend(node.all_input_nodes)
    if _updates_undeclared(call.name):
        written.extend(_written_statistics(arguments))
    return Effects(
        tuple(dict.fromkeys(written)),
        tuple(dict.fromkeys(aliased)),
        is_random,
        may_raise=base.returns_nothing and not written,
    )


def _contracts(call: Call) -> bool:
    """Tell whether a call is an `einsum` of several operands: only that of one may be a view."""
    if call.name != "aten.einsum":
        return False
    operands = call.arguments.get("tensors")
    return isinstance(operands, (list, tuple)) and len(operands) > 1


def _updates_undeclared(name: str) -> bool:
    """Tell whether a normalisation may update statistics that its schema does not say it writes."""
    return not name.endswith("_functional")


def _is_random_off(arguments: Any) -> bool:
    """Tell whether a call is of an operator that is random only in training, outside of it."""
    training = arguments.get("train", arguments.get("training"))
    return training is False or any(arguments.get(name) == 0 for name in _PROBABILITIES)


_PROBABILITIES = ("p", "dropout_p", "dropout")


def _written_statistics(arguments: Any) -> Iterator[fx.Node | Attribute]:
    """Yield the running statistics that a normalisation in training mode updates."""
    training = arguments.get("training", arguments.get("use_input_stats", False))
    if training is False:
        return
    for name in ("running_mean", "running_var"):
        yield from _tensors_in(arguments.get(name))


def _tensors_in(value: Any) -> Iterator[fx.Node | Attribute]:
    if isinstance(value, (fx.Node, Attribute)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    return (item for item in _tensors_in(value) if isinstance(item, fx.Node))


class AliasSets:
    """Which nodes may share memory, over a whole graph.

    A union of every node with the operands that it may alias: conservative, linear. Two parameters
    that are the same tensor (tied weights) share a set too, and so do inputs that shared memory
    when they were captured. Other inputs are taken for distinct memory: a traced program that
    writes to one must not be given it twice.

    Args:
        graph: The graph; nodes added later are unknown to it until `add` is told of them.

    Attributes:
        effectful: The nodes that are not pure, in no particular order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._writers: dict[fx.Node, list[fx.Node]] | None = None
        self._attribute_writers: dict[int, list[fx.Node]] = {}
        self._graph = graph
        self._attributes: dict[int, fx.Node] = {}
        self.effectful: list[fx.Node] = []
        memories: dict[int, fx.Node] = {}
        paths = {str(n.target) for n in graph.find_nodes(op="get_attr", sort=False)}
        read = attribute_memories(graph, paths) if paths else {}
        for node in graph.nodes:
            self._parent[node] = node
            if node.op == "placeholder" and MEMORY_KEY in node.meta:
                self._join(node, memories.setdefault(node.meta[MEMORY_KEY], node))
            if node.op == "get_attr":
                key = read[str(node.target)]
                self._join(node, self._attributes.setdefault(key, node))
            effects = effects_of(node)
            if effects is PURE:
                continue
            if not effects.is_pure:
                self.effectful.append(node)
            if holds_memory(node):
                for operand in effects.aliases:
                    self._join(node, operand)

    def may_alias(self, a: fx.Node, b: fx.Node) -> bool:
        """Tell whether two nodes may share memory."""
        return self.root(a) is self.root(b)

    def writers(self, value: fx.Node | Attribute) -> list[fx.Node]:
        """Return the nodes that may write to the memory of a node or attribute, in graph order."""
        if self._writers is None:
            self._find_writers()
        assert self._writers is not None
        if isinstance(value, fx.Node):
            return self._writers.get(self.root(value), [])
        key = attribute_memory(self._graph, value.path)
        node = self._attributes.get(key)
        return self._attribute_writers.get(key, []) if node is None else self.writers(node)

    def _find_writers(self) -> None:
        self._writers, self._attribute_writers = {}, {}
        for writer in sorted(self.effectful, key=order_key):
            written = effects_of(writer).writes
            roots = {self.root(w) for w in written if isinstance(w, fx.Node) and w in self._parent}
            for attribute in written:
                if isinstance(attribute, Attribute):
                    key = attribute_memory(self._graph, attribute.path)
                    self._attribute_writers.setdefault(key, []).append(writer)
                    if key in self._attributes:
                        roots.add(self.root(self._attributes[key]))
            for root in roots:
                self._writers.setdefault(root, []).append(writer)

    def is_written(self, node: fx.Node) -> bool:
        """Tell whether any node may write to a node's memory."""
        return bool(self.writers(node))

    def add(self, node: fx.Node) -> None:
        """Take in a node that was inserted after the sets were made.

        Cost: linear in its operands, and in the writers of its memory when it writes.
        """
        self._parent[node] = node
        if node.op == "get_attr":
            self._add_attribute(node)
        effects = effects_of(node)
        if effects is PURE:
            return
        for operand in effects.aliases:
            self.join(operand, node)
        if not effects.is_pure:
            self.effectful.append(node)
            self._writers = None

    def _add_attribute(self, node: fx.Node) -> None:
        key = attribute_memory(self._graph, str(node.target))
        first = self._attributes.setdefault(key, node)
        if first is not node:
            self.join(node, first)
        elif self._writers is not None and key in self._attribute_writers:
            self._writers[node] = list(self._attribute_writers[key])

    def join(self, a: fx.Node, b: fx.Node) -> None:
        """Note that two nodes may share memory from now on.

        Cost: linear in the writers of that memory.
        """
        one, other = self.root(a), self.root(b)
        if one is other:
            return
        self._join(one, other)
        if self._writers is not None:
            merged = [*self._writers.pop(one, []), *self._writers.pop(other, [])]
            if merged:
                self._writers[self.root(one)] = sorted(merged, key=order_key)

    def root(self, node: fx.Node) -> fx.Node:
        """Return the node that stands for an alias set; it changes when sets are joined."""
        root = node
        while self._parent[root] is not root:
            root = self._parent[root]
        while self._parent[node] is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        self._parent[self.root(a)] = self.root(b)


def attribute_memory(graph: fx.Graph, path: str) -> int:
    """Identify the memory behind an attribute, so that tied parameters are one."""
    return _memory(path, find_attribute(graph.owning_module, path))


def attribute_memories(graph: fx.Graph, paths: Iterable[str]) -> dict[str, int]:
    """Identify the memory behind several attributes."""
    found = find_attributes(graph.owning_module, paths)
    return {path: _memory(path, value) for path, value in found.items()}


def _memory(path: str, value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return impl_address_of(value.untyped_storage())
    return hash(path) if value is ABSENT else id(value)


def holds_memory(node: fx.Node) -> bool:
    """Tell whether a node's value is a tensor, or holds some, as far as its type is known."""
    known = type_of(node)
    return known is None or isinstance(known, (TensorType, list, tuple, dict))


def written_attributes(nodes: Iterable[fx.Node]) -> set[str]:
    """Return the qualified names of parameters and buffers that called modules write."""
    return {
        written.path
        for node in nodes
        for written in effects_of(node).writes
        if isinstance(written, Attribute)
    }
