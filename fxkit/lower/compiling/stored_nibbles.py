"""Weights of 4 bits, two to a byte, in graphs: plain calls of ATen make bytes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.ir.op import Call, resolve
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.token_scales import NAMESPACE, is_float, is_float32

aten = torch.ops.aten


def unpack_calls(call: Callable[..., fx.Node], packed: fx.Node) -> fx.Node:
    """Insert what makes int8[N, K] of int8[N, K / 2], as `unpacked_nibbles` does.

    Args:
        call: Inserts a call of an operator with operands.
        packed: What `packed_nibbles` makes.
    """
    raised = call(aten.bitwise_left_shift.Tensor_Scalar, packed, 4)
    low = call(aten.bitwise_right_shift.Tensor_Scalar, raised, 4)
    high = call(aten.bitwise_right_shift.Tensor_Scalar, packed, 4)
    return call(aten.flatten.using_ints, call(aten.stack.default, [low, high], -1), -2)


def nibbles_of(value: Any) -> fx.Node | None:
    """Return what `unpack_calls` unpacks, or None where a node is not what it makes."""
    flat = _call(value, "aten.flatten")
    pair = _call(flat.arguments["self"], "aten.stack") if flat is not None else None
    if flat is None or pair is None or pair.arguments["dim"] not in (-1, 2):
        return None
    if (flat.arguments["start_dim"], flat.arguments["end_dim"]) not in ((-2, -1), (1, 2), (1, -1)):
        return None
    tensors = pair.arguments["tensors"]
    if len(tensors) != 2:
        return None
    packed = _shifted(tensors[1], "aten.bitwise_right_shift")
    raised = _shifted(tensors[0], "aten.bitwise_right_shift")
    if packed is None or _shifted(raised, "aten.bitwise_left_shift") is not packed:
        return None
    known = type_of(packed)
    serves = isinstance(known, TensorType) and known.dtype == torch.int8 and len(known.shape) == 2
    return packed if serves else None


def _call(value: Any, name: str) -> Call | None:
    call = resolve(value) if isinstance(value, fx.Node) else None
    return call if call is not None and call.name == name else None


def _shifted(value: Any, name: str) -> fx.Node | None:
    """Return what is shifted by 4 bits."""
    call = _call(value, name)
    return call.arguments["self"] if call is not None and call.arguments["other"] == 4 else None


@dataclass(frozen=True)
class GroupedWeight:
    """A weight of 4 bits in groups along its rows.

    Attributes:
        packed: int8[N, K / 2].
        scales: float32[N, K / group].
        zeros: Zero points of the same shape, or None.
        group: How many integers share a scale.
    """

    packed: fx.Node
    scales: fx.Node
    zeros: fx.Node | None
    group: int


def grouped_weight_of(value: Any) -> GroupedWeight | None:
    """Return what a weight was dequantised from, if it was stored two to a byte, in groups."""
    call = _call(value, f"{NAMESPACE}dequantize_per_channel_group")
    packed = nibbles_of(call.arguments["input"]) if call is not None else None
    if call is None or packed is None or not is_float(value):
        return None
    given, known = call.arguments, type_of(packed)
    group, shape = given["group_size"], known.shape  # type: ignore[union-attr]
    scales, zeros = given["scales"], given["zero_points"]
    if known.is_symbolic or group % 2:  # type: ignore[union-attr]
        return None
    wanted = (shape[0], 2 * shape[1] // group)
    for one in (scales, *([] if zeros is None else [zeros])):
        stored = type_of(one)
        if not isinstance(stored, TensorType) or tuple(stored.shape) != wanted:
            return None
    return GroupedWeight(packed, scales, zeros, group) if is_float32(scales) else None
