"""Calls of every reduction: which function, on which operands, with which options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Call = tuple[Callable[..., Any], str, dict[str, Any]]
aten = torch.ops.aten


# Operator identity → calls of it. Operands are one letter each: x, y, z tensors of one shape, p one
# of numbers in (0, 1), s one of 1 and -1, w a vector as long as the last dimension, c and v vectors
# as long as the second, v without negative numbers, f and g the operands flattened, h a vector of 1
# and -1 as long as the first two dimensions, n the shape of the last dimension.
CALLS: dict[str, list[Call]] = {
    "aten.sum": [
        (torch.sum, "x", {"dim": -1}),
        (torch.sum, "x", {"dim": (0, 2), "keepdim": True}),
        (torch.sum, "x", {"dim": 1, "dtype": torch.float64}),
        (torch.sum, "x", {}),
    ],
    "aten.nansum": [(torch.nansum, "x", {"dim": -1}), (torch.nansum, "x", {})],
    "aten.mean": [(torch.mean, "x", {"dim": -1}), (torch.mean, "x", {"dim": (1, 2)})],
    "aten.nanmean": [(torch.nanmean, "x", {"dim": -1}), (torch.nanmean, "x", {"dim": 0})],
    "aten.prod": [(torch.prod, "p", {"dim": -1}), (torch.prod, "x", {"dim": 0, "keepdim": True})],
    "aten.count_nonzero": [(torch.count_nonzero, "x", {"dim": -1})],
    "aten.amax": [(torch.amax, "x", {"dim": -1}), (torch.amax, "x", {"dim": 0, "keepdim": True})],
    "aten.amin": [(torch.amin, "x", {"dim": -1}), (torch.amin, "x", {"dim": (0, 1)})],
    "aten.max": [(torch.max, "x", {})],
    "aten.min": [(torch.min, "x", {})],
    "aten.aminmax": [(torch.aminmax, "x", {"dim": -1, "keepdim": True}), (torch.aminmax, "x", {})],
    "aten.any": [(torch.any, "x", {"dim": -1}), (torch.any, "x", {})],
    "aten.all": [(torch.all, "x", {"dim": 1, "keepdim": True}), (torch.all, "x", {})],
    "aten.var": [
        (torch.var, "x", {"dim": -1}),
        (torch.var, "x", {"dim": 1, "correction": 0}),
        (torch.var, "x", {"unbiased": False}),
    ],
    "aten.std": [(torch.std, "x", {"dim": -1}), (torch.std, "x", {"dim": (1, 2), "keepdim": True})],
    "aten.var_mean": [(torch.var_mean, "x", {"dim": -1}), (torch.var_mean, "x", {})],
    "aten.std_mean": [(torch.std_mean, "x", {"dim": 0, "keepdim": True})],
    "aten.softmax": [(F.softmax, "x", {"dim": -1}), (F.softmax, "x", {"dim": 1})],
    "torch.nn.functional.softmin": [(F.softmin, "x", {"dim": -1}), (F.softmin, "x", {"dim": 0})],
    "aten._safe_softmax": [(aten._safe_softmax, "x", {"dim": -1})],
    "aten.log_softmax": [(F.log_softmax, "x", {"dim": -1}), (F.log_softmax, "x", {"dim": 0})],
    "aten.logsumexp": [
        (torch.logsumexp, "x", {"dim": -1}),
        (torch.logsumexp, "x", {"dim": (0, 1)}),
    ],
    "aten._softmax_backward_data": [
        (aten._softmax_backward_data, "xp", {"dim": -1, "input_dtype": None}),
    ],
    "aten._log_softmax_backward_data": [
        (aten._log_softmax_backward_data, "xy", {"dim": 1, "input_dtype": None}),
    ],
    "aten.dot": [(torch.dot, "fg", {})],
    "aten.vdot": [(torch.vdot, "fg", {})],
    "aten.linalg_vecdot": [
        (torch.linalg.vecdot, "xy", {}),
        (torch.linalg.vecdot, "xy", {"dim": 0}),
    ],
    "aten.renorm": [(torch.renorm, "x", {"p": 2, "dim": 0, "maxnorm": 3.0})],
    "aten.max.dim": [(torch.max, "x", {"dim": -1}), (torch.max, "x", {"dim": 0, "keepdim": True})],
    "aten.min.dim": [(torch.min, "x", {"dim": 1})],
    "aten.argmax": [(torch.argmax, "x", {"dim": -1}), (torch.argmax, "x", {})],
    "aten.argmin": [(torch.argmin, "x", {"dim": 1, "keepdim": True})],
    "aten.cumsum": [(torch.cumsum, "x", {"dim": -1}), (torch.cumsum, "x", {"dim": 0})],
    "aten.cumprod": [(torch.cumprod, "p", {"dim": -1}), (torch.cumprod, "x", {"dim": 0})],
    "aten.logcumsumexp": [(torch.logcumsumexp, "x", {"dim": d}) for d in (-1, 1)],
    "aten.cummax": [(torch.cummax, "x", {"dim": d}) for d in (-1, 1)],
    "aten.cummin": [(torch.cummin, "x", {"dim": d}) for d in (-1, 1)],
    # norms and distances
    "aten.linalg_vector_norm": [
        (torch.linalg.vector_norm, "x", {"dim": -1}),
        (torch.linalg.vector_norm, "x", {"ord": 1, "dim": 1}),
        (torch.linalg.vector_norm, "x", {"ord": math.inf, "dim": -1}),
        (torch.linalg.vector_norm, "x", {"ord": -math.inf, "dim": -1}),
        (torch.linalg.vector_norm, "x", {"ord": 0, "dim": 1}),
        (torch.linalg.vector_norm, "x", {"ord": 3, "dim": -1}),
        (torch.linalg.vector_norm, "x", {"ord": 0.5, "dim": -1, "keepdim": True}),
    ],
    "aten.norm": [(aten.norm, "x", {"p": 2, "dim": [-1]})],
    "torch.norm": [(torch.norm, "x", {}), (torch.norm, "x", {"p": 1, "dim": 1})],
    "aten.linalg_norm": [
        (torch.linalg.norm, "x", {}),
        (torch.linalg.norm, "x", {"ord": 1, "dim": -1}),
        (torch.linalg.norm, "x", {"ord": "fro", "dim": (0, 1)}),
    ],
    "aten.linalg_matrix_norm": [(torch.linalg.matrix_norm, "x", {})],
    "aten.dist": [(torch.dist, "xy", {}), (torch.dist, "xw", {"p": 1})],
    "aten.pairwise_distance": [
        (F.pairwise_distance, "xy", {}),
        (F.pairwise_distance, "xy", {"p": 1.0, "keepdim": True}),
    ],
    "aten.cosine_similarity": [
        (F.cosine_similarity, "xy", {"dim": -1}),
        (F.cosine_similarity, "xw", {}),
    ],
    "torch.cdist": [
        (torch.cdist, "xy", {"compute_mode": "donot_use_mm_for_euclid_dist"}),
        (torch.cdist, "xy", {"p": 1.0}),
    ],
    "torch.nn.functional.normalize": [
        (F.normalize, "x", {}),
        (F.normalize, "x", {"dim": -1, "eps": 0.1}),
        (F.normalize, "x", {"p": 1, "dim": -1}),
    ],
    # normalisation
    "aten.layer_norm": [(F.layer_norm, "xn", {"eps": 0.1}), (F.layer_norm, "xnww", {})],
    "aten.native_layer_norm": [(torch.native_layer_norm, "xnww", {"eps": 1e-5})],
    "aten.rms_norm": [(F.rms_norm, "xnw", {}), (F.rms_norm, "xn", {"eps": 0.1})],
    "aten.instance_norm": [(F.instance_norm, "x", {}), (F.instance_norm, "x", {"eps": 0.1})],
    "aten.batch_norm": [(F.batch_norm, "xcv", {}), (F.batch_norm, "xcvcc", {"eps": 0.1})],
    # losses
    "aten.mse_loss.reduced": [(F.mse_loss, "xy", {}), (F.mse_loss, "xy", {"reduction": "sum"})],
    "aten.l1_loss.reduced": [(F.l1_loss, "xy", {})],
    "aten.smooth_l1_loss.reduced": [
        (F.smooth_l1_loss, "xy", {}),
        (F.smooth_l1_loss, "xy", {"beta": 0.0, "reduction": "sum"}),
    ],
    "aten.huber_loss.reduced": [(F.huber_loss, "xy", {"delta": 0.5})],
    "aten.soft_margin_loss.reduced": [(F.soft_margin_loss, "xs", {})],
    "aten.binary_cross_entropy_with_logits.reduced": [
        (F.binary_cross_entropy_with_logits, "xp", {}),
        (F.binary_cross_entropy_with_logits, "xpw", {"reduction": "sum"}),
    ],
    "aten.binary_cross_entropy.reduced": [
        (F.binary_cross_entropy, "pp", {}),
        (F.binary_cross_entropy, "ppw", {"reduction": "sum"}),
    ],
    # It reads numbers, so that its type is known of a captured graph only.
    "torch.nn.functional.gaussian_nll_loss": [],
    "torch.nn.functional.gaussian_nll_loss.reduced": [],
    "aten.kl_div.reduced": [(aten.kl_div, "xp", {"reduction": 1})],
    "torch.nn.functional.kl_div.reduced": [
        (F.kl_div, "xp", {"reduction": "batchmean"}),
        (F.kl_div, "xy", {"reduction": "sum", "log_target": True}),
    ],
    "aten.hinge_embedding_loss.reduced": [(aten.hinge_embedding_loss, "xs", {"reduction": 1})],
    "torch.nn.functional.hinge_embedding_loss.reduced": [
        (F.hinge_embedding_loss, "xs", {"margin": 2.0}),
    ],
    "aten.margin_ranking_loss.reduced": [(aten.margin_ranking_loss, "xys", {"reduction": 2})],
    "torch.nn.functional.margin_ranking_loss.reduced": [
        (F.margin_ranking_loss, "xys", {"margin": 0.5}),
    ],
    "torch.nn.functional.poisson_nll_loss.reduced": [
        (F.poisson_nll_loss, "xp", {}),
        (F.poisson_nll_loss, "pp", {"log_input": False, "full": True, "reduction": "sum"}),
    ],
    "torch.nn.functional.multilabel_soft_margin_loss": [
        (F.multilabel_soft_margin_loss, "xp", {"reduction": "none"}),
    ],
    "torch.nn.functional.multilabel_soft_margin_loss.reduced": [
        (F.multilabel_soft_margin_loss, "xpw", {}),
        (F.multilabel_soft_margin_loss, "xp", {"reduction": "sum"}),
    ],
    "aten.triplet_margin_loss": [
        (aten.triplet_margin_loss, "xyz", {"reduction": 0, "margin": 1e4}),
    ],
    "torch.nn.functional.triplet_margin_loss": [
        (F.triplet_margin_loss, "xyz", {"reduction": "none", "swap": True, "margin": 1e4}),
    ],
    "aten.cosine_embedding_loss": [],
    "torch.nn.functional.cosine_embedding_loss": [
        (F.cosine_embedding_loss, "mqh", {"reduction": "none", "margin": 0.1}),
    ],
}  # fmt: skip

# Rows that leave 16-bit types to eager, which rounds in each of several steps.
IN_STEPS = frozenset(
    name
    for name in CALLS
    if name.endswith("_loss.reduced") or "kl_div" in name or "_entropy" in name or "nll" in name
    if not any(simple in name for simple in ("mse", "l1", "huber", "multilabel"))
)


def operand(letter: str, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return the operand that a letter stands for."""
    generator = torch.Generator().manual_seed(ord(letter))

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64) * 2 + 1

    if letter == "n":
        return [shape[-1]]
    if letter == "h":
        return torch.where(random(shape[0] * shape[1]) > 1, 1.0, -1.0).to(dtype)
    made = {
        "p": lambda: random(*shape).sigmoid(),
        "s": lambda: torch.where(random(*shape) > 1, 1.0, -1.0),
        "w": lambda: random(shape[-1]),
        "c": lambda: random(shape[1]),
        "v": lambda: random(shape[1]).abs() + 0.1,
        "f": lambda: random(*shape).flatten(),
        "g": lambda: random(*shape).flatten(),
        "m": lambda: random(*shape).flatten(0, 1),
        "q": lambda: random(*shape).flatten(0, 1),
    }
    return made.get(letter, lambda: random(*shape))().to(dtype)


def cases(
    shape: tuple[int, ...], dtype: torch.dtype
) -> list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Return `(operator, function, arguments, options)` that eager has a kernel for."""
    found = []
    for name, calls in CALLS.items():
        for function, letters, options in calls:
            if options.get("dtype") is not None and dtype != torch.float32:
                continue
            args = tuple(operand(letter, shape, dtype) for letter in letters)
            given = {k: dtype if k == "input_dtype" else v for k, v in options.items()}
            try:
                function(*args, **given)
            except (RuntimeError, ValueError):
                continue
            found.append((name, function, args, given))
    return found


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error relative to the largest number."""
    scale = exact.double().abs().max().clamp(min=1e-30)
    return float((found.double() - exact.double()).abs().max() / scale)


def results(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the results of a call that may have one."""
    return tuple(value) if isinstance(value, tuple) else (value,)


def wide(value: Any) -> Any:
    """Return an argument as the same call in float64 takes it."""
    if value in (torch.float32, torch.bfloat16, torch.float16):
        return torch.float64
    return value.double() if isinstance(value, torch.Tensor) else value


def shortfall(found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> str:
    """Say in what a result is worse than eager's."""
    forms = [(t.dtype, t.shape, t.stride()) for t in (found, expected)]
    if forms[0] != forms[1]:
        return f"it is {forms[0]}, in eager {forms[1]}"
    if not found.is_floating_point():
        return "" if torch.equal(found, expected) else "it is not eager's"
    if exact.isnan().any():
        return "" if torch.equal(found.isnan(), exact.isnan()) else "NaN is in other places"
    ours, eagers = error(found, exact), error(expected, exact)
    units = 64 if found.dtype == torch.float64 else 4
    bound = 2 * eagers + units * torch.finfo(expected.dtype).eps
    return "" if ours <= bound else f"{ours:.3g}, eager {eagers:.3g}"
