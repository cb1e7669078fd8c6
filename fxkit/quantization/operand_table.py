"""Which operands an operator may take quantised: one row an operator."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = "torch.nn.functional.multi_head_attention_forward"
"""What `nn.MultiheadAttention` calls."""

FAST_PATHS = ("aten._transformer_encoder_layer_fwd", "aten._native_multi_head_attention")
"""What torch's layers of transformers call in place of linear layers, where they are masked."""


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
    **dict.fromkeys(
        (
            *(f"aten.{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
            *(f"aten.{name}_cell" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
        ),
        "recurrent layers are one operator",
    ),
    **dict.fromkeys(
        ("aten.embedding_bag", "opaque.torch.nn.functional.embedding_bag"),
        "sums of rows have no row",
    ),
    "aten.bilinear": "products of three tensors have no row",
    "aten.addbmm": "products that are added to have no row but addmm",
    **dict.fromkeys(
        ("aten.mv", "aten.addmv", "aten.dot", "aten.vdot", "aten.addr", "aten.outer"),
        "products with a vector have no row",
    ),
    **dict.fromkeys(
        (
            "aten.inner",
            "torch.tensordot",
            "aten.tensordot",
            "aten.kron",
            "aten.chain_matmul",
            "aten.linalg_multi_dot",
        ),
        "products that torch makes of others have no row: write them as matmul",
    ),
    **dict.fromkeys(
        (ATTENTION, f"opaque.{ATTENTION}"),
        "its layers are inside of one call of torch's, which could not be taken apart",
    ),
    **dict.fromkeys(
        FAST_PATHS,
        "torch computes a layer with a mask in one call, its fast path: "
        "torch.backends.mha.set_fastpath_enabled(False) lets it call linear layers",
    ),
}
"""Operators that multiply and stay in floating point, and why."""
