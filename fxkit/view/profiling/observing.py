"""One run of a graph that tells of its values: types, and the memory that is alive."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxkit.analysis.liveness import Liveness
from fxkit.analysis.type_inference.type_errors import misfit, show_operands
from fxkit.errors import InvalidGraphError
from fxkit.ir.types import type_of_value
from fxkit.view.profiling.allocations import Meter, meter_for
from fxkit.view.profiling.instrument import Instrumented, tensors_in


class Observed:
    """What one run tells of values: their types, and the storages that are alive.

    Attributes:
        types: The type of each node's value.
        live: Bytes of the storages that nodes made and that are alive, while each node runs.
    """

    def __init__(
        self, nodes: tuple[fx.Node, ...], inputs: list[Any], meter: Meter | None = None
    ) -> None:
        graph = nodes[0].graph if nodes else fx.Graph()
        liveness = Liveness(graph)
        position = {node: i for i, node in enumerate(nodes)}
        self._nodes = nodes
        self._meter = meter
        self._peaks: list[int | None] = [None] * len(nodes)
        self._dying = [[position[n] for n in liveness.dying_at(node)] for node in nodes]
        self._is_given = [node.op in ("placeholder", "get_attr") for node in nodes]
        self._holders: dict[int, set[int]] = {}
        self._held: list[set[int]] = [set() for _ in nodes]
        self._sizes: dict[int, int] = {}
        self._given = {t.untyped_storage().data_ptr() for t in tensors_in(inputs) if _is_plain(t)}
        self._alive = 0
        self._seen = 0
        self._made: list[tuple[int, int, int]] = []
        self._freed: dict[int, int] = {}
        self.types: list[Any] = [None] * len(nodes)
        self.live: list[int] = [0] * len(nodes)

    def misfit(self, error: Exception) -> InvalidGraphError:
        """Return the error for the node that raised one: the first that has not been seen."""
        node = self._nodes[self._seen]
        types = dict(zip(self._nodes, self.types, strict=True))
        operands = show_operands((operand, types[operand]) for operand in node.all_input_nodes)
        return misfit(node, error, operands, {})

    def __call__(self, index: int, value: Any) -> None:
        self._seen = index + 1
        if self._meter is not None:
            self._peaks[index] = self._meter.stop()
        self._see(index, value)
        if self._meter is not None and index + 1 < len(self._nodes):
            self._meter.start()

    def workspace(self, index: int) -> int | None:
        """Return the bytes that a node took besides what was alive, and gave back."""
        peak = self._peaks[index]
        return None if peak is None else max(0, peak - self.live[index])

    def _see(self, index: int, value: Any) -> None:
        self.types[index] = type_of_value(value)
        for tensor in tensors_in(value):
            if _is_plain(tensor):
                self._hold(index, tensor.untyped_storage())
        self.live[index] = self._alive
        for dead in self._dying[index]:
            self._drop(dead, index)

    def holders(self, index: int) -> list[tuple[str, int]]:
        """Return the nodes whose storages are alive while a node runs, with bytes, most first."""
        alive = [
            (self._nodes[maker].name, size)
            for number, (maker, size, _) in enumerate(self._made)
            if maker <= index <= self._freed.get(number, len(self._nodes))
        ]
        return sorted(alive, key=lambda item: -item[1])

    def _hold(self, index: int, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if self._is_given[index]:
            self._given.add(key)
        if not size or key in self._given:
            return
        if key not in self._holders:
            self._holders[key] = set()
            self._sizes[key] = len(self._made)
            self._made.append((index, size, key))
            self._alive += size
        self._holders[key].add(index)
        self._held[index].add(key)

    def _drop(self, index: int, at: int) -> None:
        for key in self._held[index]:
            self._holders[key].discard(index)
            if not self._holders[key]:
                del self._holders[key]
                number = self._sizes.pop(key)
                self._freed[number] = at
                self._alive -= self._made[number][1]


# What torch and Python raise where a call can't take its operands.
_MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def observe(code: Instrumented, inputs: list[Any], device: torch.device | None = None) -> Observed:
    """Run a graph once and return what it tells; with a device also of its allocator.

    Raises:
        InvalidGraphError: When a node can't take its operands.
    """
    meter = meter_for(device) if device is not None else None
    observed = Observed(code.nodes, inputs, meter)
    if meter is not None:
        meter.start()
    try:
        code.observed(observed, *inputs)
    except _MISFITS as error:
        raise observed.misfit(error) from error
    finally:
        if meter is not None:
            meter.stop()
    return observed


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
