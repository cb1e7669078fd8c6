"""A made-up accelerator: tiles of 16 rows and columns, unsigned bytes by 4 bits, no floats."""

from __future__ import annotations

import torch

from fxkit.ir.op import Call
from fxkit.ir.types import TensorType, type_of
from fxkit.quantization.backends.backend_description import BackendDescription
from fxkit.quantization.specs import QuantizationSpec, TensorSpec

TILE = 16


def _whole_tiles(call: Call) -> str | None:
    known = type_of(call.arguments["weight"])
    if not isinstance(known, TensorType) or all(size % TILE == 0 for size in known.shape):
        return None
    return f"its weight of {list(known.shape)} is no whole number of tiles of {TILE}"


NARROW_TILES = BackendDescription(
    "narrow_tiles",
    specs={
        "aten.linear": (
            QuantizationSpec(
                TensorSpec(torch.uint8, 0, 255, "affine"),
                TensorSpec(torch.int8, -7, 7, "symmetric", "per_channel"),
            ),
        )
    },
    fused=frozenset(("aten.relu", "aten.gelu")),
    limits={"aten.linear": _whole_tiles},
    gives_floats=False,
)
"""Linear layers with 4 bits by channel, whose results are quantised again."""
