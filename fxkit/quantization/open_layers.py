"""Calls of layers become calls of their functions, so that weights are operands like others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fxkit.ir.op import resolve
from fxkit.ir.op_table import MODULES
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.quantization.operand_table import OPERATORS


@dataclass(frozen=True)
class OpenLayers(Pass):
    """Call the function of a layer that can be quantised, with the parameters that it has.

    Rewrites:
        %y = self.layer(%x)  →  %y = aten.linear(%x, self.layer.weight, self.layer.bias)
    """

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the calls of modules, in order. Cost: linear."""
        for node in edit.graph.find_nodes(op="call_module"):
            call = resolve(node)
            if call is None or call.name not in OPERATORS:
                continue
            layer = edit.gm.get_submodule(str(node.target))
            name, attributes = MODULES[type(layer).__name__]
            home = torch if name.startswith("torch.") else F
            function = getattr(home, name.removeprefix("torch."))
            with edit.on_behalf_of([node], "open_layers"):
                values = {}
                for attribute in attributes:
                    value = getattr(layer, attribute)
                    if isinstance(value, torch.Tensor):
                        value = edit.get_attr(f"{node.target}.{attribute}", before=node)
                    values[attribute] = value
                edit.replace(node, edit.call(function, *node.args, before=node, **values))
