"""Which operands an operator may take quantised: one row an operator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizableOperator:
    """An operator that multiplies, or looks up, quantised numbers.

    Attributes:
        activations: Operands that may be activations, by the names of the schema.
        weight: The operand that is a weight where it is a parameter or buffer.
        channels: The weight's axis of output channels.
        summed: The weight's axis that is summed over, along which groups lie; None where groups
            are none.
        float_unless_named: Why it stays in floating point unless a config names the operator or
            its node; None where any spec holds for it.
    """

    activations: tuple[str, ...]
    weight: str | None = None
    channels: int = 0
    summed: int | None = None
    float_unless_named: str | None = None


_CONVOLUTION = QuantizableOperator(("input",), "weight", 0)

OPERATORS = {
    "aten.linear": QuantizableOperator(("input",), "weight", 0, 1),
    "aten.conv1d": _CONVOLUTION,
    "aten.conv2d": _CONVOLUTION,
    "aten.conv3d": _CONVOLUTION,
    "aten.addmm": QuantizableOperator(("mat1", "mat2"), "mat2", -1),
    "aten.mm": QuantizableOperator(("self", "mat2"), "mat2", -1),
    "aten.bmm": QuantizableOperator(("self", "mat2")),
    "aten.matmul": QuantizableOperator(("self", "other"), "other", -1),
    "aten.embedding": QuantizableOperator((), "weight", 0, 1),
    "aten.scaled_dot_product_attention": QuantizableOperator(
        ("query", "key", "value"),
        float_unless_named="its two products are inside of one operator, which takes floats; "
        "by_operator or by_node may round its query, key and value",
    ),
}

NOT_QUANTIZED = {
    "aten.conv_transpose1d": "transposed convolutions have no row",
    "aten.conv_transpose2d": "transposed convolutions have no row",
    "aten.conv_transpose3d": "transposed convolutions have no row",
    "aten.einsum": "sums by letters have no row",
    "aten.baddbmm": "products that are added to have no row but addmm",
    "aten.lstm": "recurrent layers are one operator",
    "aten.gru": "recurrent layers are one operator",
    "aten.embedding_bag": "sums of rows have no row",
}
"""Operators that multiply and stay in floating point, and why."""
