"""Put nodes into submodules by labels."""

from __future__ import annotations

import re
from collections.abc import Hashable

from torch import fx

from fxkit.analysis.effect_edges import effect_predecessors
from fxkit.ir.node_kinds import body_of
from fxkit.ir.session import EditSession
from fxkit.passes.base import PassContext
from fxkit.passes.partitioning.data_reads import reads_data
from fxkit.passes.partitioning.parts import GraphPart, outline_parts
from fxkit.passes.partitioning.stages import labelled_stages

# What a node that belongs in no submodule is labelled with.
OUTSIDE = object()


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
    parts = [GraphPart.of(nodes) for _, nodes in kept]
    modules = [part.module(edit.gm) for part in parts]
    names = [_name_of(label) for label, _ in kept]
    outline_parts(edit, list(zip(parts, modules, strict=True)), effects, names.__getitem__)


def _name_of(label: Hashable) -> str:
    """Return a label as the name of a submodule."""
    text = re.sub(r"\W", "_", str(label))
    return f"part_{text}"
