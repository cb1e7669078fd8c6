"""A library for CPUs like XNNPACK: signed bytes on both sides, symmetric weights by channel."""

from __future__ import annotations

from fxkit.ir.op import Call
from fxkit.ir.types import TensorType, type_of
from fxkit.quantization.backends.backend_description import BackendDescription
from fxkit.quantization.specs import int8_dynamic, int8_static


def _one_or_all_groups(call: Call) -> str | None:
    groups, known = call.arguments["groups"], type_of(call.arguments["weight"])
    if groups == 1 or not isinstance(known, TensorType) or known.shape[1] == 1:
        return None
    return f"it has {groups} groups of several channels"


XNNPACK = BackendDescription(
    "xnnpack",
    specs={
        "aten.linear": (int8_static(scheme="symmetric"), int8_dynamic()),
        "aten.conv2d": (int8_static(scheme="symmetric"),),
    },
    fused=frozenset(("aten.relu", "aten.hardtanh")),
    moves=frozenset(("aten.max_pool2d", "aten.view", "aten.reshape", "aten.flatten")),
    limits={"aten.conv2d": _one_or_all_groups},
)
"""Both products of static scales, linear layers also with scales of tokens."""
