"""Put what runs on one device into submodules of its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fxkit.ir.node_kinds import body_of
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.partitioning.labelled_parts import split_by_labels
from fxkit.torch_adapters import pytree


@dataclass(frozen=True)
class SplitByDevice(Pass):
    """Put the nodes of each device into one submodule, called in order.

    A node runs where its result lies; a copy to another device runs where it copies from, so that
    what crosses is what a submodule returns. Python values go with what they are computed from.
    Effects keep their order, parameters are shared; gradients may be summed in another order.

    Rewrites:
        %a = aten.relu(%x); %b = aten.to(%a, 'cuda'); %c = aten.neg(%b); return %c
            →  %part_cpu = self.part_cpu(%x); %part_cuda_0 = self.part_cuda_0(%part_cpu)
               return %part_cuda_0
    """

    requires: ClassVar[tuple[str, ...]] = ("shapes_known",)
    preserves: ClassVar[tuple[str, ...]] = ("shapes_known",)
    is_idempotent: ClassVar[bool] = False
    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Label the nodes by device, sort them into stages, outline each. Cost: linear."""
        labels: dict[fx.Node, Hashable] = {}
        for node in body_of(edit.graph):
            devices = _devices(type_of(node))
            sources = [d for o in node.all_input_nodes for d in _devices(type_of(o))]
            is_copy = bool(devices) and bool(sources) and set(devices).isdisjoint(sources)
            device = (sources if is_copy else devices)[:1]
            if device:
                labels[node] = device[0]
        split_by_labels(edit, context, labels)


def _devices(known: Any) -> list[str]:
    leaves = pytree.tree_leaves(known)
    return [str(t.device).replace(":", "_") for t in leaves if isinstance(t, TensorType)]
