"""Put nodes into submodules by a function of yours."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxkit.analysis.effect_edges import effect_predecessors
from fxkit.ir.provenance import module_path
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.building_blocks.data_reads import reads_data
from fxkit.passes.building_blocks.parts import Part, outline_parts
from fxkit.passes.building_blocks.stages import labelled_stages

# What a node that belongs in no submodule is labelled with.
OUTSIDE = object()


def top_module(node: fx.Node) -> str | None:
    """Return the first part of the path of the module that a node ran in; None at the root."""
    return module_path(node).partition(".")[0] or None


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
        label: Node → its label, or None for a node that stays outside. The submodule is named
            after it. By default a label is the top module that a node ran in.
    """

    label: Callable[[fx.Node], Hashable | None] = top_module

    preserves: ClassVar[tuple[str, ...]] = ("shapes_known",)
    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Label the nodes, sort them into stages, outline each. Cost: linear in the edges."""
        labels: dict[fx.Node, Hashable] = {}
        for node in body_of(edit.graph):
            label = self.label(node)
            labels[node] = OUTSIDE if label is None else label
        split_by_labels(edit, context, labels)


def body_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that compute something, in order."""
    return [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]


def split_by_labels(
    edit: EditSession, context: PassContext, labels: dict[fx.Node, Hashable]
) -> None:
    """Put nodes of the same label into submodules named after the labels.

    Args:
        edit: The session.
        context: Gets a note for each label that got several submodules.
        labels: Node → label; a node without one goes with what it is computed from.
    """
    nodes = body_of(edit.graph)
    labels.update((node, OUTSIDE) for node in nodes if reads_data(node))
    effects = effect_predecessors(edit.graph)
    stages = labelled_stages(nodes, effects, labels)
    kept = [(label, nodes) for label, nodes in stages if label is not OUTSIDE and label is not None]
    counts: dict[Hashable, int] = {}
    for label, _ in kept:
        counts[label] = counts.get(label, 0) + 1
    for label, count in counts.items():
        if count > 1:
            context.notes.append(
                f"{label!r} gets {count} submodules, since other labels come in between"
            )
    parts = [Part.of(nodes) for _, nodes in kept]
    modules = [part.module(edit.gm) for part in parts]
    names = [_name_of(label) for label, _ in kept]
    outline_parts(edit, list(zip(parts, modules, strict=True)), effects, names.__getitem__)


def _name_of(label: Hashable) -> str:
    """Return a label as the name of a submodule."""
    text = re.sub(r"\W", "_", str(label))
    return f"part_{text}"
