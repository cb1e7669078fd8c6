"""Every row of the table of pointwise operators, against eager, for every dtype that it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fxkit.lower.scalar_ops import TABLE
from fxkit.lower.scalar_table import ScalarOp
from tests.lower.kernels import compile_all, difference, fused_names

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 1e-40, -1e-40, 1e-20, 1e30, -1e30, 3e38,
           math.inf, -math.inf, math.nan, 88.7, -88.7, 20.0, -20.0]  # fmt: skip

# Attributes without a default in the schema, and some whose default hides the interesting part.
ATTRIBUTES: dict[str, list[dict[str, Any]]] = {
    "aten.add": [{}, {"alpha": 3}],
    "aten.sub": [{}, {"alpha": 2}],
    "aten.div": [{}, {"rounding_mode": "floor"}, {"rounding_mode": "trunc"}],
    "aten.gelu": [{}, {"approximate": "tanh"}],
    "aten.threshold": [{"threshold": 0.5, "value": -2.0}],
    "aten.leaky_relu": [{}, {"negative_slope": 0.3}],
    "aten.elu": [{}, {"alpha": 1.5, "scale": 2.0, "input_scale": 0.5}],
    "aten.softplus": [{}, {"beta": 2, "threshold": 5}],
    "aten.addcmul": [{}, {"value": 0.5}],
    "aten.addcdiv": [{}, {"value": 0.5}],
    "aten.nan_to_num": [{"nan": 1.0, "posinf": 2.0, "neginf": -3.0}],
    "aten.logit": [{"eps": 0.1}, {}],
    "aten.hardtanh": [{"min_val": -0.5, "max_val": 2.0}],
}


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random numbers with every special value among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -9
        return torch.randint(low, 10, shape, generator=generator).to(dtype)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    flat = x.view(-1)
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    if flat.numel() > 100:
        # Each special value meets each other one in operators of two operands.
        places = torch.arange(len(SPECIAL) ** 2) % flat.numel()
        grid = special.repeat(len(SPECIAL)) if seed % 2 else special.repeat_interleave(len(SPECIAL))
        flat[places] = grid
    return x.to(dtype)


def operands(row: ScalarOp, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Any]:
    """Return a row's operands as tensors of one shape."""
    made: list[Any] = [values(dtype, shape, seed) for seed in range(len(row.operands))]
    for position, name in enumerate(row.operands):
        if name in ("condition", "mask"):
            made[position] = values(torch.bool, shape, 7)
        if row.name == "aten.copysign":  # torch leaves the sign of a NaN open
            made[position] = made[position].nan_to_num(3.0)
        if name == "value":
            made[position] = torch.tensor(2).to(dtype)
    return made


def eager(row: ScalarOp, args: list[Any], attributes: dict[str, Any]) -> Any:
    """Return the tensor that ATen computes, or None where it has no kernel for these types."""
    packet = getattr(torch.ops.aten, row.name.removeprefix("aten."))
    try:
        return packet(*args, **attributes)
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def exact(row: ScalarOp, args: list[Any], attributes: dict[str, Any]) -> torch.Tensor:
    """Return the result computed in float64 and rounded once: eager's own may be further off.

    Its fmod of subnormal numbers is NaN, its gelu of the largest ones infinite.
    """
    dtype = eager(row, args, attributes).dtype
    wide = [a.double() if a.is_floating_point() else a for a in args]
    return eager(row, wide, attributes).to(dtype)


def function_of(row: ScalarOp) -> Any:
    return getattr(torch.ops.aten, row.name.removeprefix("aten."))


def cases(dtype: torch.dtype, shape: tuple[int, ...]) -> list[tuple[ScalarOp, list[Any], dict]]:
    found = []
    for row in TABLE.values():
        if row.name in ("aten.to", "aten._to_copy", "aten.type_as", "aten.positive"):
            continue
        for attributes in ATTRIBUTES.get(row.name, [{}]):
            args = operands(row, dtype, shape)
            if eager(row, args, attributes) is not None:
                found.append((row, args, attributes))
    return found


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_rows_equal_eager(dtype: torch.dtype) -> None:
    rows = cases(dtype, (501,))
    compiled, inputs, nodes = compile_all([(function_of(r), tuple(a), k) for r, a, k in rows])
    fused = fused_names(compiled)
    results = compiled(*inputs)
    wrong = []
    for (row, args, attributes), node, found in zip(rows, nodes, results, strict=True):
        if node.name not in fused:
            if dtype in FLOATS:
                wrong.append(f"{row.name}{attributes} is not fused")
            continue
        expected = eager(row, args, attributes)
        error = min(difference(found, expected), difference(found, exact(row, args, attributes)))
        if error > row.tolerance:
            bad = (found != expected) & ~(found.isnan() & expected.isnan())
            i = int(bad.nonzero()[0])
            at = [a[i].item() if a.dim() else a.item() for a in args]
            wrong.append(
                f"{row.name}{attributes} {error:.3g} eps at {at}: {found[i].item()} for "
                f"{expected[i].item()}"
            )
    assert not wrong, "\n".join(wrong)
    assert len(fused) >= (60 if dtype in FLOATS else 20)
