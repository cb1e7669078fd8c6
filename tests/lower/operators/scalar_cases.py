"""Calls of every row of the table of pointwise operators, and what they should give."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxkit.lower.operators.scalar_ops import TABLE
from fxkit.lower.operators.scalar_table import ScalarOp

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 1e-40, -1e-40, 1e-20, 1e30, -1e30, 3e38,
           math.inf, -math.inf, math.nan, 88.7, -88.7, 20.0, -20.0, 3.0, -3.0]  # fmt: skip

# Attributes without a default in the schema, and some whose default hides the interesting part.
ATTRIBUTES: dict[str, list[dict[str, Any]]] = {
    "aten.add": [{}, {"alpha": 3}],
    "aten.sub": [{}, {"alpha": 2}],
    "aten.div": [{}, {"rounding_mode": "floor"}, {"rounding_mode": "trunc"}],
    "aten.round": [{}, {"decimals": 2}, {"decimals": -1}],
    "aten.gelu": [{}, {"approximate": "tanh"}],
    "aten.threshold": [{"threshold": 0.5, "value": -2.0}],
    "aten.leaky_relu": [{}, {"negative_slope": 0.3}],
    "aten.elu": [{}, {"alpha": 1.5, "scale": 2.0, "input_scale": 0.5}],
    "aten.softplus": [{}, {"beta": 2, "threshold": 5}],
    "aten.addcmul": [{}, {"value": 0.5}],
    "aten.addcdiv": [{}, {"value": 0.5}],
    "aten.nan_to_num": [{}, {"nan": 1.0, "posinf": 2.0, "neginf": -3.0}],
    "aten.logit": [{"eps": 0.1}, {}],
    "aten.threshold_backward": [{"threshold": 0.5}],
    "aten.gelu_backward": [{}, {"approximate": "tanh"}],
    "aten.hardtanh_backward": [{"min_val": -0.5, "max_val": 2.5}],
    "aten.leaky_relu_backward": [{"negative_slope": 0.3, "self_is_result": False}],
    "aten.elu_backward": [
        {"alpha": 1.5, "scale": 2.0, "input_scale": 0.5, "is_result": False},
        {"alpha": 1.5, "scale": 2.0, "input_scale": 0.5, "is_result": True},
    ],
    "aten.softplus_backward": [{"beta": 2, "threshold": 5}],
    "aten.softshrink_backward": [{"lambd": 0.5}],
    "aten.hardshrink_backward": [{"lambd": 0.5}],
    "aten.native_dropout_backward": [{"scale": 1.25}],
    "aten.smooth_l1_loss": [{"reduction": 0}, {"reduction": 0, "beta": 0.0}],
    "aten.huber_loss": [{"reduction": 0}, {"reduction": 0, "delta": 2.5}],
    "aten.logit_backward": [{}, {"eps": 0.25}],
    "aten.mse_loss_backward": [{"reduction": 0}],
    "aten.mse_loss": [{"reduction": 0}],
    "aten.l1_loss": [{"reduction": 0}],
    "aten.soft_margin_loss": [{"reduction": 0}],
    "aten.binary_cross_entropy_with_logits": [{"reduction": 0}],
    "aten.kl_div": [{"reduction": 0}, {"reduction": 0, "log_target": True}],
    "torch.nn.functional.kl_div": [{"reduction": "none"}],
    "aten.hinge_embedding_loss": [{"reduction": 0, "margin": 2.0}],
    "torch.nn.functional.hinge_embedding_loss": [{"reduction": "none"}],
    "aten.margin_ranking_loss": [{"reduction": 0, "margin": 0.5}],
    "torch.nn.functional.margin_ranking_loss": [{"reduction": "none"}],
    "torch.nn.functional.poisson_nll_loss": [
        {"reduction": "none"},
        {"reduction": "none", "log_input": False},
    ],
    "aten.hardtanh": [{"min_val": -0.5, "max_val": 2.0}],
}

# Rows that leave some floating-point types to eager, in one of their forms at least.
LEFT_TO_EAGER = {
    "aten.nextafter": (torch.bfloat16, torch.float16),
    **dict.fromkeys(
        (
            "aten.soft_margin_loss",
            "aten.binary_cross_entropy_with_logits",
            "aten.kl_div",
            "torch.nn.functional.kl_div",
            "aten.hinge_embedding_loss",
            "torch.nn.functional.hinge_embedding_loss",
            "aten.margin_ranking_loss",
            "torch.nn.functional.margin_ranking_loss",
            "torch.nn.functional.poisson_nll_loss",
            "torch.nn.functional.softsign",
            "torch.nn.functional.tanhshrink",
        ),
        (torch.bfloat16, torch.float16),
    ),
    "aten.gelu_backward": (torch.float64,),
    "aten.round": (torch.bfloat16, torch.float16),
    "aten.digamma": (torch.bfloat16, torch.float16, torch.float64),
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
        if name in ("grad_output", "grad_out"):  # the result scales with it, and so does its error
            finite = made[position].isfinite()
            made[position] = made[position].clamp(-1, 1).where(finite, made[position])
        if name in ("value", "fill_value"):
            made[position] = torch.tensor(2).to(dtype) if name == "value" else 2.0
    return made


def eager(row: ScalarOp, args: list[Any], attributes: dict[str, Any]) -> Any:
    """Return the tensor that ATen computes, or None where it has no kernel for these types."""
    try:
        return function_of(row)(args[0], **named(row, args, attributes))
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def named(row: ScalarOp, args: list[Any], attributes: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments but the first by name: operands may stand between attributes."""
    return {**dict(zip(row.operands[1:], args[1:], strict=True)), **attributes}


def exact(row: ScalarOp, args: list[Any], attributes: dict[str, Any]) -> torch.Tensor:
    """Return the result computed in float64 and rounded once: eager's own may be further off.

    Its fmod of subnormal numbers is NaN, its gelu of the largest ones infinite.
    """
    dtype = eager(row, args, attributes).dtype
    is_float = [isinstance(a, torch.Tensor) and a.is_floating_point() for a in args]
    wide = [a.double() if f else a for a, f in zip(args, is_float, strict=True)]
    return eager(row, wide, attributes).to(dtype)


def function_of(row: ScalarOp) -> Any:
    """Return what a row is called by."""
    home, _, name = row.name.rpartition(".")
    return getattr(torch.ops.aten if home == "aten" else torch.nn.functional, name)


def cases(dtype: torch.dtype, shape: tuple[int, ...]) -> list[tuple[ScalarOp, list[Any], dict]]:
    """Return the calls that eager serves: the row, its operands and its attributes."""
    found = []
    for row in TABLE.values():
        if row.name in ("aten.to", "aten._to_copy", "aten.type_as", "aten.positive"):
            continue
        if row.name.partition(".")[0] not in ("aten", "torch"):
            continue  # what quantises has tests of its own, and so have operators of users
        for attributes in ATTRIBUTES.get(row.name, [{}]):
            args = operands(row, dtype, shape)
            if eager(row, args, attributes) is not None:
                found.append((row, args, attributes))
    return found
