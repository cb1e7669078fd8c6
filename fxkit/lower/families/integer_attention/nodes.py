"""Integer attention as a value of the loop IR, and the nodes that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import fx

from fxkit.lower.codegen.cpp import matrix_unit
from fxkit.lower.families.attention.attention import (
    MAX_KEYS,
    Attention,
    attention_kernel,
    attention_of,
    checked_operand,
)
from fxkit.lower.families.integer_attention.custom_op import NAME, integer_attention
from fxkit.lower.families.product_node import arguments_of
from fxkit.lower.fusion.emit import Emitted
from fxkit.lower.loop_ir.loop_ir import Unfusable


@dataclass(frozen=True, slots=True)
class IntegerAttention(Attention):
    """The detail of an instruction `attention` of integers; see the operator's arguments.

    Queries and weights have steps of one element; no heads are shared, and none is causal.

    Attributes:
        zeros: Zero points of query, key, weights and value.
        step: The scale of the weights.
        bounds: Least and greatest integer of the weights.
        weights: Their type.
        value_scale: The scale of the values.
        divides_last: Whether weights are rounded before they are divided by their sum.
        has_tiles: Whether the processor's tiles multiply; see `matrix_unit`.
    """

    zeros: tuple[int, int, int, int] = (0, 0, 0, 0)
    step: float = 1.0
    bounds: tuple[int, int] = (0, 255)
    weights: torch.dtype = torch.uint8
    value_scale: float = 1.0
    divides_last: bool = False
    has_tiles: bool = False

    dtype: ClassVar[torch.dtype] = torch.float32

    @property
    def way(self) -> str:
        """The only way: what prints it."""
        return "integer_attention"

    def evaluated(self, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        """Attend by torch."""
        pairs = (self.batch, self.heads)
        query = memory[0].as_strided((*pairs, self.queries, self.depth), self.query)
        key = memory[1].as_strided((*pairs, self.keys, self.depth), self.key)
        value = memory[2].as_strided((*pairs, self.keys, self.width), self.value)
        mask = None
        if self.mask is not None:
            mask = memory[3].as_strided((*pairs, self.queries, self.keys), self.mask)
        return integer_attention(
            query, key, value, mask, self.scale, list(self.zeros), self.step, list(self.bounds),
            self.weights, self.value_scale, self.divides_last,
        )  # fmt: skip


def emit_integer_attention(node: fx.Node, root: torch.nn.Module) -> Emitted:
    """Return the kernel of a node that attends with integers.

    Raises:
        Unfusable: When no kernel can compute it.
    """
    given = arguments_of(node, NAME)
    operands = [given[name] for name in ("query", "key", "value")]
    operands += [] if given["mask"] is None else [given["mask"]]
    types = [checked_operand(operand, root) for operand in operands]
    dtypes = [known.dtype for known in types[:3]]
    if dtypes[0] not in (torch.int8, torch.uint8) or set(dtypes[1:]) != {torch.int8}:
        raise Unfusable("its operands are no bytes")
    plain = attention_of(types, is_causal=False, scale=given["scale"])
    if plain.depth > MAX_KEYS:
        raise Unfusable(f"sums of {plain.depth} products may need more than 32 bits")
    if plain.shared != 1 or plain.query[3] != 1:
        raise Unfusable("it shares heads, or its queries lie apart")
    parts = {field.name: getattr(plain, field.name) for field in fields(Attention)}
    detail = IntegerAttention(
        **parts,
        zeros=tuple(given["zeros"]),
        step=given["step"],
        bounds=tuple(given["bounds"]),
        weights=given["dtype"],
        value_scale=given["value_scale"],
        divides_last=given["divides_last"],
        has_tiles=matrix_unit.multiplies_bytes(),
    )
    return attention_kernel(node, detail, operands, types)
