"""An accelerator of your own: what it takes is data; a config and a partition follow from it.

Run it: python examples/own_accelerator.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

import fxkit
from fxkit import quantization as q
from fxkit.ir.op import Call
from fxkit.ir.types import TensorType, type_of
from fxkit.passes import Partition


def small_rows(call: Call) -> str | None:
    """Refuse weights with more rows than the accelerator has lanes."""
    known = type_of(call.arguments["weight"])
    if not isinstance(known, TensorType) or known.shape[0] <= 64:
        return None
    return f"{known.shape[0]} rows are more than its 64 lanes"


def make(region: fx.GraphModule, types: tuple[Any, ...]) -> Callable[..., Any]:
    """Return what runs a region: here would stand the call of your compiler."""
    print(f"compiled {len(region.graph.nodes)} nodes for {[str(known) for known in types]}")
    return region


LANES = q.BackendDescription(
    "lanes",
    specs={"aten.linear": (q.int8_static(scheme="symmetric", weights="per_tensor"),)},
    fused=frozenset(("aten.relu",)),
    limits={"aten.linear": small_rows},
    make=make,
)

if __name__ == "__main__":
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.Softmax(-1), nn.Linear(16, 99)
    model, x = nn.Sequential(*layers).eval(), torch.randn(8, 32)
    with torch.no_grad():
        quantized = fxkit.quantize(model, LANES.config(), [(x,)])
        wanted = quantized(x)
        result = fxkit.PassManager([Partition(LANES)]).run(quantized)
        print("\n".join(result.records[0].notes))
        assert torch.equal(quantized(x), wanted)
