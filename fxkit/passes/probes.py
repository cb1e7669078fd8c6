"""Probes: submodules that look at a value right after the node that made it.

Torch's dead-code elimination keeps them, and so does ours; on fake tensors they do nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from fxkit.analysis.objects import GraphNode, graph
from fxkit.ir.printer import format_node, format_source
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import PassContext
from fxkit.torch_adapters import pytree


@dataclass(frozen=True)
class ProbeSite:
    """The node that a probe looks at, as it was when the probe was put there.

    Attributes:
        name: The node's name.
        node: The node as text.
        source: The user's line that made it, or None.
    """

    name: str
    node: str
    source: str | None

    @classmethod
    def of(cls, node: fx.Node) -> ProbeSite:
        """Describe a node."""
        return cls(node.name, format_node(node), format_source(node))

    def __str__(self) -> str:
        return f"{self.node}    # {self.source}" if self.source else self.node


class Probe(nn.Module):
    """Base of all probes; a subclass says in `look` what it does with a value.

    Args:
        place: The node that it looks at.
    """

    _is_impure = True  # torch.fx keeps such a call although nobody uses its value

    def __init__(self, place: ProbeSite) -> None:
        super().__init__()
        self.place = place

    def forward(self, *values: Any) -> bool:
        """Look at real values; do nothing with fake ones."""
        leaves = pytree.tree_leaves(values)
        if not any(is_fake(leaf) for leaf in leaves):
            self.look(*values)
        return True

    def look(self, *values: Any) -> None:
        """Do what the probe is there for."""
        raise TypeError(f"{type(self).__name__} has no look method")


def is_fake(value: Any) -> bool:
    """Tell whether a value is a tensor without numbers."""
    return isinstance(value, torch.Tensor) and (value.is_meta or hasattr(value, "fake_mode"))


@dataclass(frozen=True)
class Chosen:
    """Options that say which nodes a pass looks at, as in `fxkit.graph(gm).find`.

    Attributes:
        operator: An operator in any spelling.
        module: Glob over the path of the module that a node ran in, such as `encoder.*.mlp`.
        source: `model.py` or `model.py:41`.
        where: A predicate over the objects of `fxkit.graph`.
    """

    operator: Any = None
    module: str | None = None
    source: str | None = None
    where: Callable[[GraphNode], bool] | None = None

    adds_effects: ClassVar[bool] = True

    def nodes(self, gm: fx.GraphModule, context: PassContext) -> list[fx.Node]:
        """Return the chosen nodes that may hold a tensor, other probes left out.

        Args:
            gm: The module.
            context: Takes a note when there are none.
        """
        found = graph(gm).find(
            self.operator, module=self.module, source=self.source, where=self.where
        )
        nodes = [v.fx_node for v in found if _may_hold_tensor(gm, v.fx_node)]
        if not nodes:
            context.notes.append("no node that may hold a tensor is chosen")
        return nodes


def _may_hold_tensor(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op in ("output", "get_attr") or is_probe(gm, node):
        return False
    known = type_of(node)
    return known is None or any(isinstance(t, TensorType) for t in pytree.tree_leaves(known))


def is_probe(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node calls a probe."""
    return node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), Probe)


def probes_in(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Probe]]:
    """Yield the calls of probes in a graph, each with its probe."""
    for node in gm.graph.nodes:
        if is_probe(gm, node):
            probe: Any = gm.get_submodule(str(node.target))
            yield node, probe


def insert_probe(edit: EditSession, node: fx.Node, probe: Probe) -> fx.Node:
    """Call a probe with the value of a node, right after it."""
    path = edit.register(f"probe_{node.name}", probe)
    with edit.on_behalf_of([node], edit.by):
        call = edit.insert("call_module", path, (node,), after=node, name=path)
    if "stack_trace" not in call.meta:  # an input has no line; who takes it first has one
        lines = (user.meta["stack_trace"] for user in node.users if "stack_trace" in user.meta)
        call.meta.update(("stack_trace", line) for line in itertools.islice(lines, 1))
    return call
