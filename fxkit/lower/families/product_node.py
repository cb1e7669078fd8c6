"""A node of a graph that a kernel computes block by block: a matrix product, or a convolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import resolve
from fxkit.lower.fusion.emit import Operand
from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.convolution import Convolution
from fxkit.lower.loop_ir.loop_ir import Unfusable
from fxkit.lower.loop_ir.product import Product

# Of a builder, the sum of products, and the numbers read for its column: the node's value.
Epilogue = Callable[[Builder, Ref, Sequence[Ref]], Ref]


def _as_it_is(_: Builder, total: Ref, columns: Sequence[Ref]) -> Ref:
    return total


@dataclass(frozen=True)
class ProductNode:
    """A node, and how a kernel computes it.

    Attributes:
        node: The node.
        product: What is summed, from the first two operands: buffers 0 and 1.
        operands: The tensors that are read. The last ones have one number for each column.
        strides: Of each of those last ones, the stride in elements.
        epilogue: Makes the node's value of a sum.
        is_convolution: Whether it is a packed convolution, else a product of matrices.
        dtypes: Of the first operands, those that are not float32 throughout.
    """

    node: fx.Node
    product: Product | Convolution
    operands: tuple[Operand, ...]
    strides: tuple[int, ...] = ()
    epilogue: Epilogue = _as_it_is
    is_convolution: bool = False
    dtypes: tuple[torch.dtype, ...] = ()

    def dtype_of(self, position: int) -> torch.dtype:
        """Return the dtype of an operand."""
        return self.dtypes[position] if position < len(self.dtypes) else torch.float32


def calls_of(operator: str) -> Callable[[fx.Node], bool]:
    """Return what tells whether a node calls an operator, given by its name."""

    def is_call(node: fx.Node) -> bool:
        call = resolve(node)
        return call is not None and call.name == operator

    return is_call


def arguments_of(node: fx.Node, operator: str) -> Mapping[str, Any]:
    """Return the arguments of a call of an operator by their names.

    Raises:
        Unfusable: When the node is no such call.
    """
    call = resolve(node)
    if call is None or call.name != operator:
        raise Unfusable(f"it does not call {operator}")
    return call.arguments
