"""Tensors that a program makes for itself while it runs on placeholders: constants of its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxkit.analysis.effects import effects_of
from fxkit.errors import CaptureError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.printer import format_node, format_source


class MadeTensors(TorchFunctionMode):
    """Remembers the tensors that torch makes while it is entered, in memory of their own.

    A graph holds such a tensor as a constant, the same at every call. One that the graph writes to
    would keep what an earlier call wrote. What is given as `out=` is written over as a whole, and
    of a call of which nothing is known it is not said that it writes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if found:
            given = {_memory(t) for t in pytree.tree_leaves((args, kwargs)) if self._is_older(t)}
            self._made.update((id(t), t) for t in found if _memory(t) not in given)
        return result

    def _is_older(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and id(value) not in self._made

    def check(self, graph: fx.Graph, root: torch.nn.Module, name: str) -> None:
        """Refuse a graph that writes to a tensor that the program made.

        Raises:
            CaptureError: When it does; names the line.
        """
        if not self._made:
            return
        for node in graph.nodes:
            effects = effects_of(node)
            is_known = not effects.is_opaque and "out" not in node.kwargs
            for written in effects.writes if is_known else ():
                if self._is_made(root, written):
                    raise CaptureError(
                        f"expected {name} to run on placeholders, got a write to a tensor that it "
                        "makes for itself, which would be the same at every call",
                        node=format_node(node),
                        source=format_source(node),
                        hint="use fxkit.capture(fn, args), which makes it anew at each call",
                    )

    def _is_made(self, root: torch.nn.Module, written: Any) -> bool:
        if not isinstance(written, fx.Node) or written.op != "get_attr":
            return False
        found = find_attribute(root, str(written.target))
        return isinstance(found, torch.Tensor) and self._made.get(id(found)) is found


def _memory(tensor: torch.Tensor) -> Any:
    """Return what tells the memory of a tensor; of one without plain memory, itself."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
