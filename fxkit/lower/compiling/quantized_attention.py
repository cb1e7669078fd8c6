"""Attention that is written out over integers: two products, each of which takes rounded floats.

Weights of keys are softmax(scores), or exp(scores - greatest), where the second product is divided
by their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.moved_integers import MovedIntegers
from fxkit.lower.compiling.token_scales import NAMESPACE, is_float32

PRODUCTS = ("aten.mm", "aten.bmm", "aten.matmul")
"""Products of two activations."""

_BYTES = (torch.int8, torch.uint8)


@dataclass(frozen=True)
class QuantizedAttention:
    """What a node computes: a product whose left operand is a rounded softmax of another product.

    Attributes:
        query: The left operand of the first product.
        key: Its right operand, [..., depth, keys].
        value: The right operand of the second product.
        mask: float32, added to the scores; bool, False where a key is hidden; or None.
        scale: What the first product is multiplied by.
        rounding: What quantises the weights.
        divides_last: Whether weights are not divided by their sum, but the second product is.
        between: The nodes that nothing else reads, each before those that it reads.
    """

    query: MovedIntegers
    key: MovedIntegers
    value: MovedIntegers
    mask: fx.Node | None
    scale: float
    rounding: Call
    divides_last: bool
    between: tuple[fx.Node, ...]


def attention_at(node: fx.Node) -> QuantizedAttention | None:
    """Return what a node computes if it ends an attention over integers.

    Nothing else reads what lies between.
    """
    call = resolve(node)
    divided: list[fx.Node] = []
    total: Any = None
    if call is not None and call.name == "aten.div" and _is_known(node):
        if call.arguments.get("rounding_mode") is not None:
            return None
        product, total = call.arguments["self"], call.arguments["other"]
        if not isinstance(product, fx.Node) or len(product.users) != 1:
            return None
        call, divided = resolve(product), [product]
    if call is None or call.name not in PRODUCTS:
        return None
    weights, value = operands_of(call)
    dequantized = _only(weights, f"{NAMESPACE}dequantize_per_tensor")
    stored = None if dequantized is None else dequantized.arguments["input"]
    rounding = _only(stored, f"{NAMESPACE}quantize_per_tensor")
    if rounding is None or stored is None or not _is_same_rounding(dequantized, rounding):
        return None
    rounded = rounding.arguments["input"]
    found = _softmax(rounded) if total is None else _exponential(rounded, total)
    if found is None:
        return None
    scores, above = found
    reached = _scores(scores, 1 if total is None else 2)
    if reached is None:
        return None
    first, scale, mask, below = reached
    query, key, moved = (MovedIntegers.of(one) for one in (*operands_of(first), value))
    if query is None or key is None or moved is None:
        return None
    between = (*divided, weights, stored, *above, *below)
    return QuantizedAttention(query, key, moved, mask, scale, rounding, total is not None, between)


def operands_of(call: Call) -> tuple[Any, Any]:
    """Return the operands of a product of two activations."""
    right = call.arguments.get("mat2")
    return call.arguments["self"], call.arguments["other"] if right is None else right


def _softmax(weights: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the scores of a softmax over keys, and the nodes that make weights of them."""
    softmax = _only(weights, "aten.softmax")
    if softmax is None or not _is_over_keys(softmax):
        return None
    return softmax.arguments["self"], [weights]


def _exponential(weights: Any, total: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the scores of weights that are divided later, and the nodes between.

    Args:
        weights: exp(scores - greatest), perhaps.
        total: What the second product is divided by.
    """
    power, added = _only(weights, "aten.exp", readers=2), _only(total, "aten.sum")
    less = None if power is None else _only(power.arguments["self"], "aten.sub")
    if power is None or less is None or added is None:
        return None
    scores, greatest = less.arguments["self"], less.arguments["other"]
    most = _only(greatest, "aten.amax")
    if (
        most is None
        or added.arguments["self"] is not weights
        or less.arguments.get("alpha", 1) != 1
    ):
        return None
    if most.arguments["self"] is not scores or len(scores.users) != 2:
        return None
    if not (_is_along_keys(most) and _is_along_keys(added) and is_float32(scores)):
        return None
    return scores, [total, weights, power.arguments["self"], greatest]


def _is_along_keys(call: Call) -> bool:
    """Tell whether a reduction is along the last axis, of which it keeps one element."""
    dim, operand = call.arguments.get("dim"), call.arguments["self"]
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    known = type_of(operand)
    last = len(known.shape) - 1 if isinstance(known, TensorType) else -1
    is_float = call.arguments.get("dtype") in (None, torch.float32)
    return dims in ([-1], [last]) and call.arguments.get("keepdim") is True and is_float


def _only(value: Any, name: str, readers: int = 1) -> Call | None:
    """Return the call of an operator that a node is, where so many nodes read it."""
    call = resolve(value) if isinstance(value, fx.Node) and len(value.users) == readers else None
    return call if call is not None and call.name == name and _is_known(value) else None


def _is_known(node: fx.Node) -> bool:
    """Tell whether a node is a tensor of sizes that are known."""
    known = type_of(node)
    return isinstance(known, TensorType) and not known.is_symbolic


def _is_same_rounding(dequantized: Call | None, rounding: Call) -> bool:
    names = ("scale", "zero_point", "quant_min", "quant_max", "dtype")
    ours, theirs = (
        [None if one is None else one.arguments.get(name) for name in names]
        for one in (dequantized, rounding)
    )
    scale, zero, *_, dtype = theirs
    is_number = isinstance(scale, float) and scale > 0 and math.isfinite(1 / scale)
    return ours == theirs and is_number and isinstance(zero, int) and dtype in _BYTES


def _is_over_keys(softmax: Call) -> bool:
    scores = softmax.arguments["self"]
    known = type_of(scores) if isinstance(scores, fx.Node) else None
    if not isinstance(known, TensorType) or known.dtype != torch.float32:
        return False
    dtype = softmax.arguments.get("dtype")
    last = len(known.shape) - 1
    return softmax.arguments["dim"] in (-1, last) and dtype in (None, torch.float32)


def _scores(value: Any, readers: int) -> tuple[Call, float, fx.Node | None, list[fx.Node]] | None:
    """Return the product that scores are made of, its factor, the mask, and what is between.

    Args:
        value: The scores.
        readers: How many nodes read them.
    """
    mask: fx.Node | None = None
    scale = 1.0
    between: list[fx.Node] = []
    while isinstance(value, fx.Node) and len(value.users) == readers and is_float32(value):
        call, readers = resolve(value), 1
        between.append(value)
        if call is None:
            return None
        if call.name in PRODUCTS:
            return call, scale, mask, between
        left, right = call.arguments.get("self"), call.arguments.get("other")
        if call.name == "aten.add" and mask is None and scale == 1.0:
            if call.arguments.get("alpha", 1) != 1 or not isinstance(right, fx.Node):
                return None
            (value, mask) = (left, right) if _is_of_product(left) else (right, left)
            if not is_float32(mask):
                return None
        elif call.name in ("aten.mul", "aten.div") and isinstance(right, (int, float)):
            if call.arguments.get("rounding_mode") is not None or not right:
                return None
            scale, value = scale * (right if call.name == "aten.mul" else 1 / right), left
        else:
            return None
    return None


def _is_of_product(value: Any) -> bool:
    """Tell whether a node is a product, perhaps times a number."""
    call = resolve(value) if isinstance(value, fx.Node) else None
    if call is not None and call.name in ("aten.mul", "aten.div"):
        if isinstance(call.arguments["other"], fx.Node):
            return False
        return _is_of_product(call.arguments["self"])
    return call is not None and call.name in PRODUCTS
