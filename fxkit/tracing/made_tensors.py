"""Tensors that a program makes for itself while it runs on placeholders: constants of its graph."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from fxkit.analysis.effects import effects_of
from fxkit.errors import CaptureError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.printer import format_node, format_source
from fxkit.torch_adapters import pytree
from fxkit.tracing.recorder.frames import is_user_file, source_text
from fxkit.tracing.recorder.recorded import memory_of

# What gives no tensor and needs the numbers in one, and what writes but is not named so.
_READING = frozenset(
    """item tolist numpy __bool__ __int__ __float__ __index__ __contains__ __array__ equal allclose
    is_nonzero""".split()
)
_WRITING = frozenset(
    """__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__
    __ior__ __ixor__ __ilshift__ __irshift__""".split()
)


class MadeTensors(TorchFunctionMode):
    """Remembers the tensors that torch makes while it is entered, in memory of their own.

    A graph holds such a tensor as a constant, the same at every call. One that the graph writes to
    would keep what an earlier call wrote. What is given as `out=` is written over as a whole, and
    of a call of which nothing is known it is not said that it writes. While there are placeholders
    alone, nothing is in it yet: then the program can't read it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.Tensor] = {}
        self._awaiting: set[Any] = set()  # memory that the graph is to write

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(result)
        found = [t for t in leaves if isinstance(t, torch.Tensor)]
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves):
            written = pytree.tree_leaves((kwargs or {}).get("out"))
            self._awaiting.update(memory_of(t) for t in written if isinstance(t, torch.Tensor))
        elif self._awaiting and self._reads_early(func, args, kwargs or {}, found):
            raise CaptureError(
                f"expected a program that runs on placeholders, got {_name_of(func)} of a tensor "
                "that a call is to write, which has no numbers yet",
                source=_users_line(sys._getframe(1)),
                hint="read what the call with `out=` returns, or use fxkit.capture(fn, args)",
            )
        if found:
            given = {memory_of(t) for t in pytree.tree_leaves((args, kwargs)) if self._is_older(t)}
            self._made.update((id(t), t) for t in found if memory_of(t) not in given)
        return result

    def _reads_early(
        self, func: Any, args: Any, kwargs: dict[str, Any], found: list[torch.Tensor]
    ) -> bool:
        """Tell whether a call that has run needed numbers that only the graph will write."""
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        awaited = {memory_of(t) for t in given} & self._awaiting
        if not awaited:
            return False
        name = _name_of(func)
        is_writing = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
        if is_writing or "out" in kwargs or name in _READING:
            return True
        return any(memory_of(t) not in awaited for t in found)

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


def _name_of(func: Any) -> str:
    """Return the name of a function of torch."""
    return str(getattr(func, "__name__", func))


def _users_line(frame: FrameType | None) -> str | None:
    """Return the innermost line of the user's that led to a frame."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    code = frame.f_code
    return source_text(f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
