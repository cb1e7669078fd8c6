"""The modules of a graph as a tree of groups, with repeated layers folded.

Groups come from the module stack that a capture recorded, else from the targets of `call_module`
nodes; where there is neither, from the paths of constants or from what repeats (`structure`). A
module that is called twice, or whose nodes other nodes come between, would make a cycle of groups:
it is split into as many groups as it takes. Constants (`get_attr`) belong to their users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxkit.ir.attributes import find_attribute
from fxkit.ir.node_kinds import COMPUTES_NOTHING
from fxkit.ir.provenance import module_stack
from fxkit.view.drawings.grouping import acyclic_groups
from fxkit.view.drawings.structure import Stack, infer_stacks
from fxkit.view.texts.labels import Label, label_of


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """One node that is shown."""

    node: fx.Node
    label: Label


@dataclass(frozen=True, eq=False, slots=True)
class Fold:
    """How many like siblings a group stands for.

    Attributes:
        count: Number of groups, the shown one included.
        last: Name of the last one, relative to the parent.
        members: The groups that are not shown, in order.
    """

    count: int
    last: str
    members: tuple[ModuleGroup, ...]


@dataclass(frozen=True, eq=False, slots=True)
class ModuleGroup:
    """A module's nodes and inner groups.

    Attributes:
        path: Qualified name of the module; "" for the root.
        name: The name relative to the parent group.
        kind: Name of the module's class; "" when it isn't known.
        items: Leaves and groups, in the order they run.
        parameters: Tensor elements of the parameters and buffers below it, each counted once.
        fold: What the group stands for besides itself, or None.
        call: 0 for a module's only or first group, 1 for the second call of it, and so on.
    """

    path: str
    name: str
    kind: str
    items: tuple[Leaf | ModuleGroup, ...]
    parameters: int
    fold: Fold | None = None
    call: int = 0

    def leaves(self) -> Iterator[Leaf]:
        """Iterate over all nodes below, those of folded-away siblings not included."""
        for item in self.items:
            if isinstance(item, Leaf):
                yield item
            else:
                yield from item.leaves()

    @property
    def title(self) -> str:
        """The name as it is shown: `layer.0 … layer.5 × 6`, `fc (call 2)`."""
        if self.fold is not None:
            return f"{self.name} … {self.fold.last} × {self.fold.count}"
        return f"{self.name} (call {self.call + 1})" if self.call else self.name

    @property
    def only(self) -> Leaf | None:
        """The single node of a group that holds nothing else."""
        if len(self.items) == 1 and isinstance(self.items[0], Leaf):
            return self.items[0]
        return None


@dataclass(slots=True)
class _Draft:
    """A group under construction."""

    path: str
    kind: str
    nodes: list[fx.Node] = field(default_factory=list)


class Hierarchy:
    """The tree of groups of one graph module.

    Args:
        gm: The graph module.
        fold: Whether like siblings that follow each other are folded into one.
        only: The nodes to show; all when left out.

    Attributes:
        graph_module: The graph module.
        nodes: The nodes that are shown, in the order they run.
        operands: The nodes that each of them reads.
        users: The nodes that read each of them.
        labels: The words of each of them.
        size: How many nodes of the graph these stand for, with the constants that they read.
        root: The outermost group.
    """

    def __init__(
        self, gm: fx.GraphModule, *, fold: bool = True, only: Collection[fx.Node] | None = None
    ) -> None:
        self.graph_module = gm
        self.fold = fold
        self.nodes = [
            node for node in gm.graph.nodes if is_shown(node) and (only is None or node in only)
        ]
        self.size = len(gm.graph.nodes) if only is None else sum(map(stands_for, self.nodes))
        self.operands, self.users = edges(self.nodes)
        self.labels = {node: label_of(node) for node in self.nodes}
        stacks = {node: stack_of(node) for node in self.nodes}
        self._build(self._inferred(stacks) if fold else stacks, constant_sizes(gm))

    def _inferred(self, stacks: dict[Any, Stack]) -> dict[Any, Stack]:
        """Return the modules around each node, with groups for those that have none."""

        def words(node: Any) -> object:
            label = self.labels[node]
            return (*_work(label, self.subject(node).target), label.type)

        def reads(node: Any) -> str:
            operands = self.subject(node).all_input_nodes
            return next((str(o.target) for o in operands if o.op == "get_attr"), "")

        return infer_stacks(self.nodes, stacks, self.users, words, reads, self._kind)

    def _kind(self, path: str) -> str:
        try:
            name = type(self.graph_module.get_submodule(path)).__name__
        except AttributeError:
            return ""
        return "" if name in ("Module", "ModuleList", "ModuleDict") else name

    def _build(self, stacks: dict[fx.Node, Stack], sizes: dict[fx.Node, dict[int, int]]) -> None:
        """Make the groups; nodes, edges and labels are there."""
        self._stacks = stacks
        self._sizes = sizes
        self._signatures: dict[ModuleGroup, int] = {}
        self._interned: dict[object, int] = {}
        self.root = self._group("", type(self.graph_module).__name__, self.nodes, 0, 0)

    def subject(self, node: fx.Node) -> fx.Node:
        """Return the node of a graph that a node of this tree stands for: itself."""
        return node

    def _more(self, node: fx.Node) -> object:
        """Return what else has to be equal for two layers to be alike."""
        return None

    def _group(
        self, path: str, kind: str, nodes: list[fx.Node], depth: int, call: int, parent: str = ""
    ) -> ModuleGroup:
        items: list[Leaf | ModuleGroup] = []
        calls: Counter[str] = Counter()
        for draft in self._drafts(nodes, depth):
            if draft.path is None:
                items.append(Leaf(draft.nodes[0], self.labels[draft.nodes[0]]))
                continue
            items.append(
                self._group(draft.path, draft.kind, draft.nodes, depth + 1, calls[draft.path], path)
            )
            calls[draft.path] += 1
        group = ModuleGroup(
            path=path,
            name=_relative(path, parent),
            kind=kind,
            items=tuple(self._folded(items) if self.fold else items),
            parameters=self._parameters(nodes),
            call=call,
        )
        self._signatures[group] = self._intern(self._signature(nodes, items, depth))
        return group

    def _drafts(self, nodes: list[fx.Node], depth: int) -> list[_Draft]:
        """Group nodes by the module at `depth` of their stacks, in an order without cycles."""
        keys: dict[fx.Node, tuple[str, str] | fx.Node] = {}
        for node in nodes:
            stack = self._stacks[node]
            keys[node] = stack[depth] if depth < len(stack) else node
        runs = acyclic_groups(nodes, keys, self.users)
        drafts = []
        for run in runs:
            key = keys[run[0]]
            path, kind = key if isinstance(key, tuple) else (None, "")
            drafts.append(_Draft(path, kind, run))  # pyright: ignore[reportArgumentType]
        return drafts

    def _parameters(self, nodes: list[fx.Node]) -> int:
        seen: dict[int, int] = {}
        for node in nodes:
            seen.update(self._sizes.get(node, {}))
        return sum(seen.values())

    def _folded(self, items: list[Leaf | ModuleGroup]) -> list[Leaf | ModuleGroup]:
        result: list[Leaf | ModuleGroup] = []
        start = 0
        while start < len(items):
            first = items[start]
            end = start + 1
            while end < len(items) and self._is_alike(first, items[end]):
                end += 1
            if isinstance(first, ModuleGroup) and end - start > 1:
                folded = _fold(first, items[start + 1 : end])
                self._signatures[folded] = self._signatures[first]
                result.append(folded)
            else:
                result.append(first)
            start = end
        return result

    def _is_alike(self, first: Leaf | ModuleGroup, other: Leaf | ModuleGroup) -> bool:
        return (
            isinstance(first, ModuleGroup)
            and isinstance(other, ModuleGroup)
            and first.only is None
            and self._signatures[first] == self._signatures[other]
            and first.kind == other.kind
        )

    def _signature(
        self, nodes: list[fx.Node], items: list[Leaf | ModuleGroup], depth: int
    ) -> tuple[object, ...]:
        """Describe operators, types and inner wiring, so that equal layers have equal values."""
        index = {node: i for i, node in enumerate(nodes)}
        described: list[object] = []
        for node in nodes:
            label = self.labels[node]
            inner = tuple(index.get(operand, -1) for operand in self.operands[node])
            names = tuple(name for name, _ in self._relative_stack(node, depth))
            work = _work(label, self.subject(node).target)
            described.append((*work, label.type, inner, names, self._more(node)))
        return (len(items), tuple(described))

    def _relative_stack(self, node: fx.Node, depth: int) -> list[tuple[str, str]]:
        stack = self._stacks[node]
        return [
            (_relative(stack[i][0], stack[i - 1][0] if i else ""), stack[i][1])
            for i in range(depth, len(stack))
        ]

    def _intern(self, value: object) -> int:
        return self._interned.setdefault(value, len(self._interned))


def _work(label: Label, target: object) -> tuple[object, object]:
    """Describe what a node does; calls of one kernel do the same, whatever they are called."""
    kernel = getattr(target, "kernel", None)
    if label.family == "kernel" and kernel is not None:
        return kernel, None
    return label.operator, label.constants


_Edges = dict[fx.Node, list[fx.Node]]


def edges(nodes: list[fx.Node]) -> tuple[_Edges, _Edges]:
    """Return operands and users of nodes, among these nodes."""
    users: _Edges = {node: [] for node in nodes}
    operands: _Edges = {}
    for node in nodes:
        operands[node] = [operand for operand in node.all_input_nodes if operand in users]
        for operand in operands[node]:
            users[operand].append(node)
    return operands, users


def is_shown(node: fx.Node) -> bool:
    """Tell whether a node is shown by itself: constants are part of the nodes that use them."""
    if node.op != "get_attr":
        return True
    return any(user.op == "output" for user in node.users)


def stands_for(node: fx.Node) -> int:
    """Count a node that is shown, and the constants that it reads as the first of their users."""
    read = (operand for operand in node.all_input_nodes if not is_shown(operand))
    return 1 + sum(next(iter(operand.users)) is node for operand in read)


def _fold(first: ModuleGroup, others: list[Leaf | ModuleGroup]) -> ModuleGroup:
    members = tuple(item for item in others if isinstance(item, ModuleGroup))
    fold = Fold(1 + len(members), members[-1].name, members)
    parameters = first.parameters + sum(member.parameters for member in members)
    return ModuleGroup(
        first.path, first.name, first.kind, first.items, parameters, fold, first.call
    )


def stack_of(node: fx.Node) -> Stack:
    if node.op in COMPUTES_NOTHING:
        return ()
    stack = [
        (path, cls if isinstance(cls, str) else cls.__name__) for path, cls in module_stack(node)
    ]
    if not stack and node.op == "call_module":
        stack = _stack_of_target(node)
    plain = [(path, kind.rpartition(".")[2]) for path, kind in stack if path]
    return tuple(entry for i, entry in enumerate(plain) if i == 0 or entry[0] != plain[i - 1][0])


def _stack_of_target(node: fx.Node) -> list[tuple[str, str]]:
    owner = node.graph.owning_module
    parts = str(node.target).split(".")
    stack: list[tuple[str, str]] = []
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        kind = type(owner.get_submodule(path)).__name__ if owner is not None else ""
        if kind not in ("Module", "ModuleList", "ModuleDict"):
            stack.append((path, kind))
    return stack


def _relative(path: str, parent: str) -> str:
    if parent and path.startswith(f"{parent}."):
        return path[len(parent) + 1 :]
    return path


def constant_sizes(gm: fx.GraphModule) -> dict[fx.Node, dict[int, int]]:
    """Map each node to the sizes of the constants it reads, keyed by the tensor's identity."""
    sizes: dict[fx.Node, dict[int, int]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            tensor = find_attribute(gm, str(node.target))
            if isinstance(tensor, torch.Tensor):
                for user in node.users:
                    sizes.setdefault(user, {})[id(tensor)] = tensor.numel()
        elif node.op == "call_module":
            module = find_attribute(gm, str(node.target))
            if isinstance(module, torch.nn.Module):
                tensors = [*module.parameters(), *module.buffers()]
                sizes.setdefault(node, {}).update({id(t): t.numel() for t in tensors})
    return sizes
