"""Decompositions: calls of a graph, each computed by others; the part that all tables share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.symbols import Symbol
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.decomposition.recording import OperatorRecording, form_of_call, record
from fxkit.passes.decomposition.replaying import replay
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.operators import OpOverload

Entry = Callable[[fx.Node, Call], None]


class Decomposition(ABC):
    """Computes calls of a graph by others; a subclass is the table that says which, and by what.

    Args:
        edit: The session of the pass.
        context: Where it is noted what stays as it is.
        name: The name of the pass.
    """

    def __init__(self, edit: EditSession, context: PassContext, name: str) -> None:
        self.edit = edit
        self.context = context
        self.name = name
        self.recordings: dict[Any, OperatorRecording] = {}

    @abstractmethod
    def entry(self, node: fx.Node, call: Call) -> Entry | None:
        """Return what puts others in the place of a call; None where that is not asked for.

        Raises:
            Unrecordable: When it can't be done; so does the entry.
        """

    def expansion(self, overload: Any) -> Callable[..., Any] | None:
        """Return what computes an operator that a call makes; None keeps it."""
        return None

    def operand_type(self, node: fx.Node) -> Any:
        """Return the type of a tensor, or the expression of a size, that a call takes.

        Raises:
            Unrecordable: When it is not known, or something else.
        """
        known = type_of(node)
        if known is None:
            raise Unrecordable(f"the type of %{node.name} is not known")
        if not isinstance(known, (TensorType, Symbol)):
            raise Unrecordable(f"it depends on %{node.name}, which may differ from call to call")
        return known

    def visit(self, node: fx.Node) -> None:
        """Decompose one node, or note why it stays as it is."""
        call = resolve(node)
        if call is None:
            return
        try:
            entry = self.entry(node, call)
            if entry is not None:
                with self.edit.on_behalf_of([node], self.name):
                    entry(node, call)
        except Unrecordable as reason:
            called = node.target if isinstance(node.target, OpOverload) else call.name
            self.context.notes.append(f"%{node.name} stays a call of {called}: {reason}")

    def replay(self, node: fx.Node, target: Any, operands: Any, form: Any = None) -> None:
        """Record what a call does, or find it recorded, and put that in its place."""
        leaves, spec = pytree.tree_flatten(operands, is_leaf=lambda v: isinstance(v, slice))
        nodes = list(dict.fromkeys(nodes_in(leaves)))
        key = form_of_call((form or target, str(spec)), _flat(leaves))
        recording = self.recordings.get(key) if key is not None else None
        if recording is None:
            known = [self.operand_type(n) for n in nodes]

            def run(*tensors: Any) -> Any:
                values = dict(zip(nodes, tensors, strict=True))
                filled = pytree.tree_unflatten([_filled(v, values) for v in leaves], spec)
                return target(*filled[0], **filled[1])

            recording = record(run, known, self.expansion)
            if key is not None:
                self.recordings[key] = recording
        result = replay(self.edit, recording, nodes, node)
        self.give(node, result)

    def give(self, node: fx.Node, result: Any) -> None:
        """Let a node's users use what replaces it: a node, or a nest of nodes and constants."""
        if isinstance(result, fx.Node):
            self.take_over(node, result)
            return
        if node.users:
            for user in list(node.users):
                self._give_part(user, node, result)
        if node.users:
            raise Unrecordable("its results are taken whole")
        self.edit.erase(node)

    def _give_part(self, user: fx.Node, node: fx.Node, result: Any) -> None:
        taken = resolve(user)
        if taken is None or taken.name != "python.getitem" or user.args[0] is not node:
            self.edit.set_args(
                user,
                map_arg(user.args, lambda n: result if n is node else n),
                map_arg(user.kwargs, lambda n: result if n is node else n),
            )
            return
        part = result[taken.arguments["1"]]
        if isinstance(part, fx.Node):
            self.edit.replace(user, part)
            return
        for further in list(user.users):
            self._give_part(further, user, part)
        if not user.users:
            self.edit.erase(user)

    def take_over(self, node: fx.Node, new: fx.Node) -> None:
        """Let a node's users use another one, of the same type."""
        known = type_of(node)
        self.edit.replace(node, new)
        if known is not None and new.op != "placeholder":
            set_type(new, known)


class Decompose(Pass):
    """Base of the passes that decompose calls; each has a table.

    Attributes:
        table: Says which calls are decomposed, and what into.
    """

    table: ClassVar[type[Decomposition]]

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges."""
        table = self.table(edit, context, self.name)
        for node in list(edit.graph.nodes):
            table.visit(node)


_METHODS: dict[str, Callable[..., Any]] = {}


def function_of(node: fx.Node) -> Any:
    """Return what a node calls; a method as a function."""
    return _method(str(node.target)) if node.op == "call_method" else node.target


def _method(name: str) -> Callable[..., Any]:
    """Return a method as a function, the same one each time."""
    if name not in _METHODS:
        _METHODS[name] = lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)
    return _METHODS[name]


def nodes_in(leaves: list[Any]) -> list[fx.Node]:
    """Return the nodes among leaves, those in slices too."""
    return [leaf for leaf in _flat(leaves) if isinstance(leaf, fx.Node)]


def _flat(leaves: list[Any]) -> list[Any]:
    """Return leaves with slices taken apart."""
    flat: list[Any] = []
    for leaf in leaves:
        flat.extend((leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,))
    return flat


def _filled(leaf: Any, values: dict[fx.Node, Any]) -> Any:
    if isinstance(leaf, slice):
        return slice(*(_filled(part, values) for part in (leaf.start, leaf.stop, leaf.step)))
    return values[leaf] if isinstance(leaf, fx.Node) else leaf
