"""Show what layers with stored weights take to a function, in each graph of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, fx

from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.probes import Probe, ProbeSite, insert_probe
from fxkit.quantization.stored_layers import StoredLayer, stored_layers

Look = Callable[[Tensor], None]
"""Takes an input of layers."""


class InputProbe(Probe):
    """Shows the input of some layers to a function, unless it is empty.

    Args:
        place: What makes the input.
        show: Takes it.
    """

    def __init__(self, place: ProbeSite, show: Look) -> None:
        super().__init__(place)
        self.show = show

    def look(self, *values: Any) -> None:
        """Show the value."""
        for value in values:
            if isinstance(value, Tensor) and value.numel():
                self.show(value.detach())


@dataclass(frozen=True)
class WatchInputs(Pass):
    """Show what linear layers and convolutions with stored weights take.

    Rewrites:
        %y = aten.linear(%x, %w)  →  opaque.InputProbe(%x); %y = aten.linear(%x, %w)

    Attributes:
        watch: Takes a graph and the layers of it that share an input; returns what is shown the
            input, or None.
    """

    watch: Callable[[fx.GraphModule, Sequence[StoredLayer]], Look | None] = lambda gm, layers: None

    is_idempotent: ClassVar[bool] = False
    adds_effects: ClassVar[bool] = True

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Insert a probe behind each input that is watched. Cost: linear."""
        nodes = {node.name: node for node in edit.graph.nodes}
        by_input: dict[str, list[StoredLayer]] = {}
        for layer in stored_layers(edit.gm):
            by_input.setdefault(layer.input, []).append(layer)
        for name, layers in by_input.items():
            show = self.watch(edit.gm, layers)
            if show is not None:
                insert_probe(edit, nodes[name], InputProbe(ProbeSite.of(nodes[name]), show))
