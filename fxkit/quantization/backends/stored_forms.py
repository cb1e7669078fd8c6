"""How quantise and dequantise nodes store a tensor, to be held against what a backend takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxkit.ir.op import resolve
from fxkit.quantization.specs import TensorSpec

_GRANULARITIES = {
    "per_tensor": "per_tensor",
    "per_channel": "per_channel",
    "per_channel_group": "per_group",
    "per_token": "per_token",
}


@dataclass(frozen=True)
class StoredForm:
    """What a quantise or dequantise node says of its integers.

    Attributes:
        dtype: Their type.
        low: The least one.
        high: The largest one.
        granularity: What shares a scale.
        group_size: Elements of a group, or None.
        zero_point: Where it is one number, that number; None where there is none, or several.
        has_zero_points: Whether there are zero points at all.
    """

    dtype: torch.dtype
    low: int
    high: int
    granularity: str
    group_size: int | None
    zero_point: int | None
    has_zero_points: bool

    def is_of(self, spec: TensorSpec) -> bool:
        """Tell whether a spec stores tensors so; a symmetric one has its zero in the middle."""
        mine = (self.dtype, self.granularity, self.group_size)
        if mine != (spec.dtype, spec.granularity, spec.group_size):
            return False
        if not spec.low <= self.low < self.high <= spec.high:
            return False
        middle = (spec.low + spec.high + 1) // 2
        if spec.scheme == "affine" or not self.has_zero_points:
            return True
        return self.granularity == "per_token" or self.zero_point == middle

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        zero = " with zero points" if self.has_zero_points and self.zero_point != 0 else ""
        return f"{kind} {self.low} to {self.high} {self.granularity}{zero}"


def stored_form(node: fx.Node) -> StoredForm | None:
    """Return how a quantise or dequantise node stores its tensor, or None where it is neither."""
    call = resolve(node)
    kind = "" if call is None else call.name.partition(".")[2]
    granularity = _GRANULARITIES.get(kind.partition("quantize_")[2].partition(".")[0])
    if call is None or granularity is None:
        return None
    arguments = call.arguments
    zero = arguments.get("zero_point", arguments.get("zero_points"))
    return StoredForm(
        arguments["dtype"],
        int(arguments["quant_min"]),
        int(arguments["quant_max"]),
        granularity,
        arguments.get("group_size"),
        zero if isinstance(zero, int) else None,
        zero is not None,
    )
