"""Put nodes into submodules by a function of yours."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxkit.analysis.objects import GraphNode, graph
from fxkit.ir.node_kinds import body_of
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.partitioning.labelled_parts import OUTSIDE, split_by_labels


def top_module(node: GraphNode) -> str | None:
    """Return the first part of the path of the module that a node ran in; None at the root."""
    return node.module_path.partition(".")[0] or None


@dataclass(frozen=True)
class SplitByCallback(Pass):
    """Put the nodes that a function gives the same label into one submodule, called in order.

    Each label gets one submodule where its nodes can run in one go, else as few as come out when
    labels take turns. What reads numbers out of tensors stays outside. Effects keep their order;
    parameters stay where they are and are shared. Nodes keep their numbers; gradients may be summed
    in another order.

    Rewrites:
        %a = aten.relu(%x); %b = aten.neg(%a); return %b, with labels 0 and 1
            →  %part_0 = self.part_0(%x); %part_1 = self.part_1(%part_0); return %part_1

    Attributes:
        label: Node, as `fxkit.graph` shows it → its label, or None for one that stays outside. The
            submodule is named after it. By default a label is the top module that a node ran in.
    """

    label: Callable[[GraphNode], Hashable | None] = top_module

    preserves: ClassVar[tuple[str, ...]] = ("shapes_known",)
    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Label the nodes, sort them into stages, outline each. Cost: linear in the edges."""
        labels: dict[fx.Node, Hashable] = {}
        views = graph(edit.gm)
        for node in body_of(edit.graph):
            label = self.label(views[node.name])
            labels[node] = OUTSIDE if label is None else label
        split_by_labels(edit, context, labels)
