"""Compute once what is the same at every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import effects_of
from fxkit.errors import FxkitError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.op import is_check
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.options import check_at_least
from fxkit.passes.properties import is_dequantised
from fxkit.torch_adapters.fx_nodes import is_erased
from fxkit.torch_adapters.tensors import impl_address_of


@dataclass(frozen=True)
class ConstantFolding(Pass):
    """Replace what is computed from constants alone by its value, kept as a buffer.

    Constants are numbers, buffers and, when asked for, parameters. Folding freezes them: a buffer
    that is changed after this pass is not seen any more by what was folded. Views of constants are
    left alone, since they cost nothing and share memory; so is what would be larger than
    `max_bytes`, what anybody writes to, and what leaves the graph, since each call has to return
    a tensor of its own. A check of a value that constants alone determine goes, if it holds.

    Rewrites:
        %p = aten.arange(8); return aten.add(%x, %p)  →  return aten.add(%x, self._folded)

    Attributes:
        max_bytes: Largest result to keep, in bytes.
        fold_parameters: Whether parameters are constants: for inference only.
        fold_dequantized: Whether quantised weights become floating point, which takes four to eight
            times the memory; and buffers of float8 and bfloat16 the wider type they are cast to.
        where: Tells which nodes are folded, by a predicate over `torch.fx` nodes; views of
            constants, and what leaves the graph, too. When left out, all but those are.
    """

    max_bytes: int = 16 * 2**20
    fold_parameters: bool = False
    fold_dequantized: bool = False
    where: Callable[[fx.Node], bool] | None = None

    def drops_gradients(self) -> bool:
        """Tell whether parameters are constants."""
        return self.fold_parameters

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_at_least(self, "max_bytes", 0)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges, and that of the folded nodes."""
        folder = _Folder(edit, context, self)
        for node in list(edit.graph.nodes):
            folder.visit(node)
        folder.replace()


class _Folder:
    def __init__(self, edit: EditSession, context: PassContext, options: ConstantFolding) -> None:
        self.edit = edit
        self.context = context
        self.options = options
        self.values: dict[fx.Node, Any] = {}
        self.order = EffectOrder(edit.graph)
        output = next(iter(reversed(edit.graph.nodes)))
        root = self.order.aliases.root
        self.returned = {root(n) for n in output.all_input_nodes}
        self.has_modes = any(effects_of(n).is_global for n in edit.graph.nodes)

    def visit(self, node: fx.Node) -> None:
        """Compute a node when all that it takes is known."""
        if node.op == "get_attr":
            self._read(node)
            return
        if node.op not in ("call_function", "call_method") or self.has_modes:
            return
        if is_check(node):
            self._settle(node)
            return
        if is_dequantised(node) and not self.options.fold_dequantized:
            self._leave_stored(node)
            return
        operands = node.all_input_nodes
        if any(operand not in self.values for operand in operands):
            return
        if not effects_of(node).is_pure or self.order.aliases.is_written(node):
            return
        self.values[node] = self._compute(node)
        if not _is_small(self.values[node], self.options.max_bytes):
            del self.values[node]
            self.context.notes.append(f"%{node.name} is too large to keep")

    def _settle(self, check: fx.Node) -> None:
        """Take out a check of a known value that holds now, and so at each call."""
        if not all(one in self.values for one in check.all_input_nodes) or check.users:
            return
        if self.options.where is not None and not self.options.where(check):
            return
        try:
            self._compute(check)
        except FxkitError:  # each call raises it
            return
        self.edit.erase(check)

    def _leave_stored(self, node: fx.Node) -> None:
        """Leave what a weight is unpacked by, such as two integers to a byte, as it is stored."""
        waiting = [operand for operand in node.all_input_nodes if operand.op != "get_attr"]
        while waiting:
            operand = waiting.pop()
            if self.values.pop(operand, None) is not None:
                waiting += [one for one in operand.all_input_nodes if one.op != "get_attr"]

    def replace(self) -> None:
        """Read the value in place of each folded node that others need."""
        for node, value in self.values.items():
            if node.op == "get_attr" or not isinstance(value, torch.Tensor):
                continue
            readers = self._readers(node)
            if not readers or not self._is_wanted(node):
                continue
            with self.edit.on_behalf_of([node], "constant_folding"):
                read = self.edit.add_attribute("_folded", value.detach(), before=node)
                self.edit.replace_uses(node, read, readers.__contains__)
        for node in reversed(list(self.values)):
            if not is_erased(node) and not node.users:
                self.edit.erase(node)

    def _read(self, node: fx.Node) -> None:
        value = find_attribute(self.edit.gm, str(node.target))
        is_parameter = isinstance(value, torch.nn.Parameter)
        if not isinstance(value, torch.Tensor) or self.order.aliases.is_written(node):
            return
        if not is_parameter or self.options.fold_parameters:
            self.values[node] = value

    def _compute(self, node: fx.Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        with torch.no_grad():
            if callable(node.target):
                return node.target(*args, **kwargs)
            return getattr(args[0], node.target)(*args[1:], **kwargs)

    def _readers(self, node: fx.Node) -> dict[fx.Node, None]:
        """Return the users that may read the value: none whose result a caller could write to.

        What leaves the graph is computed in each call anyway, so folding it is asked for or left.
        """
        root = self.order.aliases.root
        own = root(node)
        readers = dict.fromkeys(user for user in node.users if user not in self.values)
        if own not in self.returned:
            return readers
        if self.options.where is None:
            return {}
        return {user: None for user in readers if user.op != "output" and root(user) is not own}

    def _is_wanted(self, node: fx.Node) -> bool:
        where = self.options.where
        return not self._is_view_of_constant(node) if where is None else where(node)

    def _is_view_of_constant(self, node: fx.Node) -> bool:
        """Tell whether a folded node only shows a constant's own memory."""
        memory = impl_address_of(self.values[node].untyped_storage())
        return any(
            n.op == "get_attr" and impl_address_of(v.untyped_storage()) == memory
            for n, v in self.values.items()
        )


def _is_small(value: Any, limit: int) -> bool:
    return not isinstance(value, torch.Tensor) or value.nbytes <= limit
