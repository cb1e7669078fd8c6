"""Write into memory that nobody needs any more."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxkit.analysis.effects import AliasSets, effects_of
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.torch_adapters.operators import OpOverload, schema_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class Reinplace(Pass):
    """Let an operator write its result over an operand whose last use it is.

    That saves the memory of the result. The operand's memory has to be the graph's own, which
    neither the caller nor any later node sees, of the result's shape, dtype and strides, and no
    other operand may lie in it. An input or buffer that gets its new value by `copy_` at the end is
    written directly, when its old value is not read after that. Nothing is done where a gradient is
    wanted, since that may need what would be overwritten.

    Rewrites:
        %a = aten.add(%x, 1); %b = aten.mul(%a, 2); return %b
            →  %a = aten.add(%x, 1); %b = aten.mul_(%a, 2); return %b
        %a = aten.add(%x, 1); %c = aten.copy_(%x, %a); return None
            →  %a = aten.add_(%x, 1); return None
    """

    requires: ClassVar[tuple[str, ...]] = ("shapes_known", "aten")
    preserves: ClassVar[tuple[str, ...]] = ("aten", "shapes_known")

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges."""
        memory = _Memory(edit)
        for copy in memory.write_backs():
            memory.write_directly(copy)
        saved = 0
        for node in list(edit.graph.nodes):
            operand = memory.overwritable(node)
            if operand is not None:
                known = type_of(node)
                memory.overwrite(node, operand)
                saved += known.nbytes
        if saved:
            context.notes.append(f"results of {saved} bytes take no memory of their own")


class _Memory:
    """Who uses the memory of a graph last, and who else sees it."""

    def __init__(self, edit: EditSession) -> None:
        self.edit = edit
        self.aliases = AliasSets(edit.graph)
        self.last_use: dict[fx.Node, fx.Node] = {}
        self.fixed: set[fx.Node] = set()
        self.returned: set[fx.Node] = set()
        root = self.aliases.root
        for node in edit.graph.nodes:
            for operand in node.all_input_nodes:
                self.last_use[root(operand)] = node
                if node.op == "output":
                    self.returned.add(root(operand))
            if node.op in ("placeholder", "get_attr") or effects_of(node).is_opaque:
                self.fixed.add(root(node))

    def overwritable(self, node: fx.Node) -> fx.Node | None:
        """Return the operand that a node may write its result over."""
        operand = _first_operand(node)
        if operand is None or not _may_hold(operand, node):
            return None
        root = self.aliases.root(operand)
        if root in self.fixed or root in self.returned or self.last_use.get(root) is not node:
            return None
        return operand if self._is_apart(node, operand) else None

    def _is_apart(self, node: fx.Node, operand: fx.Node) -> bool:
        """Tell whether no other operand lies in the memory that would be written."""
        others = [o for o in node.all_input_nodes if o is not operand]
        if any(self.aliases.may_alias(o, operand) for o in others):
            return False
        is_pointwise = torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
        rest = (*node.args[1:], *node.kwargs.values())
        return is_pointwise or not _holds(rest, operand)

    def overwrite(self, node: fx.Node, operand: fx.Node) -> fx.Node:
        """Write a node's result over an operand; return the node that has it."""
        known, overload = type_of(node), node.target
        keywords: dict[str, Any] = dict(node.kwargs)
        with self.edit.on_behalf_of([node], "reinplace"):
            if overload in _SCATTERS:
                part = self.edit.call(
                    _SCATTERS[overload], operand, *node.args[2:], before=node, **keywords
                )
                set_type(part, type_of(node.args[1]))  # type: ignore[arg-type]
                self.aliases.add(part)
                write = self.edit.call(_aten.copy_.default, part, node.args[1], before=node)
                set_type(write, type_of(part))
                self.aliases.add(write)
                new = operand
            else:
                twin = _in_place(overload)
                new = self.edit.call(twin, *node.args, before=node, **keywords)
                set_type(new, known)
                self.aliases.add(new)
        roots = (self.aliases.root(node), self.aliases.root(operand))
        uses = [
            self.last_use[r] for r in roots if r in self.last_use and self.last_use[r] is not node
        ]
        is_returned = any(r in self.returned for r in roots)
        self.edit.replace(node, new)
        self.aliases.join(node, new)
        root = self.aliases.root(new)
        if uses:
            self.last_use[root] = max(uses)
        if is_returned:
            self.returned.add(root)
        if any(r in self.fixed for r in roots):
            self.fixed.add(root)
        return new

    def write_backs(self) -> list[fx.Node]:
        """Return the `copy_` calls at the end that bring values into inputs and attributes."""
        found = []
        for node in reversed(self.edit.graph.nodes):
            if node.op == "output":
                continue
            if node.target is not _aten.copy_.default or node.users:
                break
            found.append(node)
        return found

    def write_directly(self, copy: fx.Node) -> None:
        """Compute a value in the input or attribute that it is copied to, if nobody can tell."""
        target, value = copy.args[:2]
        if not isinstance(target, fx.Node) or target.op not in ("placeholder", "get_attr"):
            return
        chain = self._chain(target, value, copy)
        if not chain:
            return
        self.edit.erase(copy)
        current = target
        for node in reversed(chain):
            current = self.overwrite(node, current)

    def _chain(self, target: fx.Node, value: Any, copy: fx.Node) -> list[fx.Node]:
        """Return the nodes that make a value of an input's old one, last first; [] if they may not.

        Each writes over what the one before it made, so whoever reads that must come earlier.
        """
        chain: list[fx.Node] = []
        while isinstance(value, fx.Node) and value is not target:
            operand = _first_operand(value)
            if operand is None or not _may_hold(operand, value):
                return []
            if self.aliases.root(value) in self.returned or not self._is_apart(value, operand):
                return []
            if operand is not target and self.aliases.may_alias(operand, target):
                return []
            if not self._is_read_before(operand, value, copy):
                return []
            chain.append(value)
            value = operand
        return chain

    def _is_read_before(self, operand: fx.Node, writer: fx.Node, copy: fx.Node) -> bool:
        """Tell whether all that shows an operand's memory is read before a node writes to it."""
        seen, stack = {operand}, [operand]
        while stack:
            shown = stack.pop()
            for user in shown.users:
                if (
                    user in (copy, writer)
                    or (user.op == "output" and shown is not operand)
                    or (user.op == "output" and operand.op in ("placeholder", "get_attr"))
                ):
                    continue
                if writer < user:
                    return False
                if shown in effects_of(user).aliases and user not in seen:
                    seen.add(user)
                    stack.append(user)
        return True


def _first_operand(node: fx.Node) -> fx.Node | None:
    """Return the operand over which an operator's form in place writes, if it has one."""
    if not isinstance(node.target, OpOverload) or not node.args:
        return None
    if node.target not in _SCATTERS and _in_place(node.target) is None:
        return None
    operand = node.args[0]
    return operand if isinstance(operand, fx.Node) else None


def _may_hold(operand: fx.Node, node: fx.Node) -> bool:
    """Tell whether an operand's memory is right for a result, and autograd needs neither."""
    have, want = type_of(operand), type_of(node)
    if not isinstance(have, TensorType) or have != want or have.stride is None:
        return False
    gapless = all(
        size <= 1 or stride > 0 for size, stride in zip(have.shape, have.stride, strict=True)
    )
    return gapless and not have.requires_grad and not effects_of(node).aliases


@functools.cache
def _in_place(overload: Any) -> Any:
    """Return the overload that writes the same result over its first operand, or None."""
    schema = schema_of(overload)
    name = schema.name.partition("::")[2]
    packet = getattr(_aten, f"{name}_", None) if overload.namespace == "aten" else None
    if packet is None or len(schema.returns) != 1 or schema.is_mutable:
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    for candidate in packet.overloads():
        found = getattr(packet, candidate)
        arguments = schema_of(found).arguments
        if [(a.name, str(a.type)) for a in arguments] == wanted and arguments[0].alias_info:
            return None if torch.Tag.inplace_view in found.tags else found
    return None


# Operators that put a part into a copy of a whole → the view of the whole that shows the part.
_SCATTERS: dict[Any, Any] = {
    _aten.select_scatter.default: _aten.select.int,
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
}


def _holds(value: Any, node: fx.Node) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds(item, node) for item in value)
    return value is node
