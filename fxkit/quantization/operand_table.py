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

_TRANSPOSED = QuantizableOperator(
    ("input",),
    "weight",
    1,
    float_unless_named="no integer kernel computes transposed convolutions; by_operator or by_node "
    "may round what they take",
)

OPERATORS = {
    "aten.linear": QuantizableOperator(("input",), "weight", 0, 1),
    "aten.conv1d": _CONVOLUTION,
    "aten.conv2d": _CONVOLUTION,
    "aten.conv3d": _CONVOLUTION,
    "aten.conv_transpose1d": _TRANSPOSED,
    "aten.conv_transpose2d": _TRANSPOSED,
    "aten.conv_transpose3d": _TRANSPOSED,
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

_ADDED = "of products with an addend addmm alone is quantised: write it as matmul and an addition"

NOT_QUANTIZED = {
    "aten.einsum": "einsum is not quantised: write it as linear or matmul",
    "aten.baddbmm": _ADDED,
    **dict.fromkeys(
        (
            *(f"aten.{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
            *(f"aten.{name}_cell" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
        ),
        "recurrent layers are one operator",
    ),
    **dict.fromkeys(
        ("aten.embedding_bag", "opaque.torch.nn.functional.embedding_bag"),
        "embedding_bag is not quantised: embedding is, with a sum behind it",
    ),
    "aten.bilinear": "products of three tensors are not quantised",
    "aten.addbmm": _ADDED,
    **dict.fromkeys(
        ("aten.mv", "aten.addmv", "aten.dot", "aten.vdot", "aten.addr", "aten.outer"),
        "products with a vector are not quantised: those with a matrix of one row are",
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
        "torch makes it of other products: write it as matmul",
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
