"""Take all probes out of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.probes import probes_in


@dataclass(frozen=True)
class RemoveProbes(Pass):
    """Erase what `CheckNumbers`, `PrintValues`, `ObserveValues` and `TimeNodes` inserted.

    Rewrites:
        %a = aten.log(%x); opaque.NumberCheck(%a); return %a  →  %a = aten.log(%x); return %a
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Erase the calls and the submodules of probes. Cost: linear."""
        for node, _ in list(probes_in(edit.gm)):
            edit.erase(node)
            edit.unregister(str(node.target))
