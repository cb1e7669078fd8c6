"""Why a layer of a quantised graph is not computed with integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, short_dtype, type_of
from fxkit.lower.compiling.quantized_operands import dequantizes, integers_of, weight_of
from fxkit.lower.compiling.token_scales import NAMESPACE, is_float, is_float32
from fxkit.passes.stored_floats import is_widened

_NONE = "neither of its operands is quantised"


def reason_in_float(
    activation: Any, weight: Any, rank: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> str:
    """Return why kernels of integers don't take the operands of a layer.

    Args:
        activation: What it takes.
        weight: Its weight.
        rank: How many axes that has to have.
        dtypes: What both may have been dequantised to.
    """
    made, stored = _dequantized(activation), _dequantized(weight)
    if made is None and stored is None:
        return _NONE
    if weight_of(weight, rank, dtypes) is None:
        return _of_weight(weight, stored, rank, dtypes)
    if made is None and not is_float32(activation):
        return f"its activations are {_short(activation)}"
    if integers_of(activation, dtypes) is None:
        return _of_activation(activation, made, dtypes)
    return "its sizes or settings are not numbers that are known"


def takes_dequantized(node: fx.Node) -> bool:
    """Tell whether any operand of a node is dequantised."""
    return any(_dequantized(operand) is not None for operand in node.all_input_nodes)


def _dequantized(value: Any) -> Call | None:
    call = resolve(value) if isinstance(value, fx.Node) else None
    return call if call is not None and dequantizes(call) else None


def _short(value: Any) -> str:
    known = type_of(value) if isinstance(value, fx.Node) else None
    return short_dtype(known.dtype) if isinstance(known, TensorType) else "of a type not known"


def _of_weight(weight: Any, call: Call | None, rank: int, dtypes: tuple[torch.dtype, ...]) -> str:
    """Return what is the matter with a weight."""
    if call is None:
        is_stored = isinstance(weight, fx.Node) and is_widened(weight)
        return f"its weight is {'stored in floating point' if is_stored else 'not quantised'}"
    if not is_float(weight, dtypes):
        return f"its weight is dequantised to {_short(weight)}"
    if call.name == f"{NAMESPACE}dequantize_per_channel_group":
        return "its weight has a scale for each of several groups of a row"
    integers = call.arguments["input"]
    known = type_of(integers) if isinstance(integers, fx.Node) else None
    if not isinstance(known, TensorType) or known.dtype != torch.int8:
        return f"its weight is stored as {_short(integers)}"
    if known.is_symbolic or known.stride is None or not known.numel:
        return "its weight is empty, or its sizes are not known"
    if len(known.shape) != rank:
        return f"its weight has {len(known.shape)} axes"
    if call.name == f"{NAMESPACE}dequantize_per_tensor":
        return "its weight has one zero point for all, or a scale that is no number"
    return "its weight has scales along another axis, or scales or zero points of another type"


def _of_activation(activation: Any, call: Call | None, dtypes: tuple[torch.dtype, ...]) -> str:
    """Return what is the matter with activations."""
    if call is None:
        return "its activations are floats"
    if not is_float(activation, dtypes):
        return f"its activations are dequantised to {_short(activation)}"
    integers = call.arguments["input"]
    known = type_of(integers) if isinstance(integers, fx.Node) else None
    if not isinstance(known, TensorType) or known.dtype not in (torch.int8, torch.uint8):
        return f"its activations are stored as {_short(integers)}"
    if known.is_symbolic or known.stride is None or not known.numel:
        return "its activations are empty, or their sizes are not known"
    if call.name.startswith(f"{NAMESPACE}dequantize_per_token"):
        return "the scales of its tokens are read elsewhere, or are not float32"
    return "its activations have several scales, or a zero point that 8 bits don't hold"
