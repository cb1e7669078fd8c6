"""A module under edit: its attributes, and its graph as a whole, with what takes changes back."""

from __future__ import annotations

import keyword
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxkit.errors import RewriteError
from fxkit.ir.journalled_graph import JournalledGraph
from fxkit.ir.node_arguments import check_name
from fxkit.torch_adapters.fx_graphs import exchange_graph
from fxkit.torch_adapters.layers import (
    buffers_of,
    children_of,
    non_persistent_buffers_of,
    parameters_of,
)


class JournalledModule(JournalledGraph):
    """A graph under edit with the module that owns it; see `JournalledGraph`."""

    def __init__(self, gm: fx.GraphModule, by: str = "") -> None:
        self._names = _FreeNames(gm)
        super().__init__(gm, by)

    def register(self, name: str, value: Any) -> str:
        """Register an attribute on the root module without reading it; return its free name."""
        check_name(name)
        name = self._names.free(name.replace(".", "_"))
        _put_attribute(self.gm, name, value)
        self._record("attribute", name, f"{name} = {type(value).__name__}",
                     lambda: delattr(self.gm, name))  # fmt: skip
        return name

    def unregister(self, name: str) -> None:
        """Take an attribute that nothing reads any more off the module that holds it.

        Args:
            name: Its path. Below the root module it has to lie in a plain `nn.Module`, which holds
                attributes for this graph alone.

        Raises:
            RewriteError: When there is no such attribute, or it belongs to a layer.
        """
        name, put_back = _take_attribute(self.gm, name)
        self._record("attribute", name, f"{name} is gone", put_back)

    def adopt(self, other: fx.GraphModule) -> None:
        """Take over the whole graph of another module, with the attributes that it names.

        Args:
            other: A module whose graph was made from a copy of this one, by a tool that does not
                use sessions.
        """
        old = self.gm.graph
        for node in other.graph.nodes:
            top = str(node.target).partition(".")[0]
            if node.op in ("get_attr", "call_module") and not hasattr(self.gm, top):
                setattr(self.gm, top, getattr(other, top))
                self._record("attribute", top, top, lambda top=top: delattr(self.gm, top))
        exchange_graph(self.gm, other.graph)
        self.graph.owning_module = self.gm

        def undo() -> None:
            exchange_graph(self.gm, old)
            old.owning_module = self.gm

        self._record("adopt", type(other).__name__, f"{len(old.nodes)} -> {len(self.graph.nodes)} "
                     "nodes", undo)  # fmt: skip


class _FreeNames:
    """Names of attributes that a module does not have yet.

    Args:
        gm: The module.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._tries: dict[str, int] = {}

    def free(self, wished: str) -> str:
        """Return a name as it is wished for, or with a number behind it when it is taken."""
        name = wished
        count = self._tries.get(wished, 0)
        if count and hasattr(self._gm, last := f"{wished}_{count}"):
            name = last  # all before it were taken too
        else:
            count = 0
        while hasattr(self._gm, name) or keyword.iskeyword(name):
            count += 1
            name = f"{wished}_{count}"
        self._tries[wished] = count
        return name


def _put_attribute(gm: fx.GraphModule, name: str, value: Any) -> None:
    """Register a parameter, a tensor (as a buffer) or a module, or set any other attribute."""
    if isinstance(value, torch.nn.Parameter):
        gm.register_parameter(name, value)
    elif isinstance(value, torch.nn.Module):
        gm.add_module(name, value)
    elif isinstance(value, torch.Tensor):
        gm.register_buffer(name, value)
    else:
        setattr(gm, name, value)


def _take_attribute(gm: fx.GraphModule, path: str) -> tuple[str, Callable[[], None]]:
    """Take an attribute off the module that holds it.

    Args:
        gm: The module of the graph.
        path: Its path from there. Below, it has to lie in a plain `nn.Module`, which holds
            attributes for the graph alone.

    Returns:
        Its name in the module that held it, and what puts it back, in its place among the others.

    Raises:
        RewriteError: When there is no such attribute, or it belongs to a layer.
    """
    parent, _, name = path.rpartition(".")
    owner = gm.get_submodule(parent) if parent else gm
    tables: tuple[Any, ...] = (
        parameters_of(owner),
        buffers_of(owner),
        children_of(owner),
        owner.__dict__,
    )
    table = next((table for table in tables if name in table), None)
    if table is None or (parent and type(owner) is not torch.nn.Module):
        raise RewriteError(
            f"expected an attribute that the graph's module holds, got {path!r}",
            hint="give the name that edit.register returned",
        )
    value, names = table[name], list(table)
    following = names[names.index(name) + 1 :]
    is_hidden = name in non_persistent_buffers_of(owner)
    delattr(owner, name)

    def put_back() -> None:
        table[name] = value
        table.update({n: table.pop(n) for n in following if n in table})
        if is_hidden:
            non_persistent_buffers_of(owner).add(name)

    return name, put_back
