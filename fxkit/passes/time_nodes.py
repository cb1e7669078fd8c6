"""Measure how long chosen nodes take, inside the graph itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.probes import Chosen, Probe, ProbeSite, insert_probe
from fxkit.torch_adapters import pytree


@dataclass
class Timings:
    """What the nodes took, in seconds, a number for each call.

    Attributes:
        seconds: Place → the times, in the order of the calls.
    """

    seconds: dict[ProbeSite, list[float]] = field(default_factory=dict)

    def table(self) -> str:
        """Return a line a node: the least time, the calls, the node with its source line."""
        ordered = sorted(self.seconds.items(), key=lambda item: -min(item[1]))
        return "\n".join(
            f"{min(times) * 1e6:10.1f} µs  {len(times):4} ×  {place}" for place, times in ordered
        )


class _Clock:
    started = 0.0


class Start(Probe):
    """Starts a clock before a node runs."""

    def __init__(self, place: ProbeSite, clock: _Clock) -> None:
        super().__init__(place)
        self.clock = clock

    def look(self, *values: Any) -> None:
        """Start the clock when the device has finished what came before."""
        _wait(values)
        self.clock.started = time.perf_counter()


class Stop(Probe):
    """Stops the clock when a node has run."""

    def __init__(self, place: ProbeSite, clock: _Clock, timings: Timings) -> None:
        super().__init__(place)
        self.clock = clock
        self.timings = timings

    def look(self, *values: Any) -> None:
        """Stop the clock when the device has finished."""
        _wait(values)
        seconds = time.perf_counter() - self.clock.started
        self.timings.seconds.setdefault(self.place, []).append(seconds)


def _wait(values: Any) -> None:
    if any(isinstance(v, torch.Tensor) and v.is_cuda for v in pytree.tree_leaves(values)):
        torch.cuda.synchronize()


@dataclass(frozen=True)
class TimeNodes(Chosen, Pass):
    """Measure the time that each chosen node takes, at every call.

    Rewrites:
        %a = aten.log(%x); return %a
            →  opaque.Start(%x); %a = aten.log(%x); opaque.Stop(%a); return %a

    Attributes:
        timings: Where the times go.
    """

    timings: Timings = field(default_factory=Timings)

    is_idempotent: ClassVar[bool] = False

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Insert a start before and a stop after each chosen node. Cost: linear."""
        for node in self.nodes(edit.gm, context):
            if node.op == "placeholder":
                continue
            place, clock = ProbeSite.of(node), _Clock()
            insert_probe(edit, node, Stop(place, clock, self.timings))
            path = edit.register(f"probe_{node.name}", Start(place, clock))
            with edit.on_behalf_of([node], edit.by):
                edit.insert(
                    "call_module", path, tuple(node.all_input_nodes), before=node, name=path
                )
