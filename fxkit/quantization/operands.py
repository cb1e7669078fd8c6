"""Operands of a node are exchanged for others."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn
from torch.fx.node import map_arg

from fxkit.ir.session import EditSession


def take_instead(edit: EditSession, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> None:
    """Let a node take other operands in place of some."""

    def substitute(operand: fx.Node) -> fx.Node:
        return new.get(operand, operand)

    kwargs = dict(map_arg(node.kwargs, substitute))
    edit.set_args(node, map_arg(node.args, substitute), kwargs)


def drop_unread(edit: EditSession, path: str) -> None:
    """Take a weight that nothing reads any more off a graph's own modules."""
    owner = edit.gm.get_submodule(path.rpartition(".")[0])
    is_own = owner is edit.gm or type(owner) is nn.Module
    reads = edit.graph.find_nodes(op="get_attr")
    if is_own and all(str(other.target) != path for other in reads):
        edit.unregister(path)
