"""Operands of a node are exchanged for others."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx
from torch.fx.node import map_arg

from fxkit.ir.session import EditSession


def take_instead(edit: EditSession, node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> None:
    """Let a node take other operands in place of some."""

    def substitute(operand: fx.Node) -> fx.Node:
        return new.get(operand, operand)

    kwargs = dict(map_arg(node.kwargs, substitute))
    edit.set_args(node, map_arg(node.args, substitute), kwargs)
