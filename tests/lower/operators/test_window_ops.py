"""Rows over spaces of their own: pooling, groups of channels, losses that pick classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxkit
from fxkit.lower import to_cpp
from fxkit.lower.operators.reduction_ops import TABLE
from tests.lower.kernels import ALWAYS, compile_all, fused_names
from tests.sampling import one_in

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

AVERAGES: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
]
EXTREMA: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 1, "dilation": 2},
]
aten = torch.ops.aten
AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
LARGEST = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
PLACED = {
    1: aten.max_pool1d_with_indices,
    2: aten.max_pool2d_with_indices,
    3: aten.max_pool3d_with_indices,
}
ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
PARTS = {1: aten.adaptive_max_pool1d, 2: aten.adaptive_max_pool2d, 3: aten.adaptive_max_pool3d}
LARGEST_WITH_PLACES: dict[int, Any] = {
    rank: getattr(F, f"max_pool{rank}d_with_indices") for rank in (1, 2, 3)
}
PARTS_WITH_PLACES: dict[int, Any] = {
    rank: getattr(F, f"adaptive_max_pool{rank}d_with_indices") for rank in (1, 2, 3)
}
POWERS = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}


def image(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 6, *(11, 9, 7)[:rank], dtype=torch.float64).to(dtype)


def with_special_numbers(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with equal neighbours, NaN next to NaN, and infinities all over windows."""
    x[1] = x[1].round()
    flat = x.view(-1)
    flat[5:7] = math.nan
    flat[20:40] = -math.inf
    return x


def pools(dtype: torch.dtype) -> list[Call]:
    found: list[Call] = []
    for rank in (1, 2, 3):
        found += [(AVERAGE[rank], (image(rank, dtype),), o) for o in AVERAGES]
        for options in EXTREMA:
            x = with_special_numbers(image(rank, dtype))
            found.append((LARGEST[rank], (x,), options))
            found.append((PLACED[rank], (x.clone(),), options))
            found.append((LARGEST_WITH_PLACES[rank], (x.clone(),), options))
        found += [(ADAPTIVE[rank], (image(rank, dtype), size), {}) for size in (1, 4, 7, 12)]
        special = with_special_numbers(image(rank, dtype))
        for size in (1, 4, 12):
            found.append((PARTS[rank], (special.clone(), (size,) * rank), {}))
            found.append((PARTS_WITH_PLACES[rank], (special.clone(), size), {}))
        found += [(POWERS[rank], (image(rank, dtype).abs(), p, 3, 2), {}) for p in (1.5, 2)]
    found.append((F.avg_pool2d, (image(2, dtype)[0], 3), {"divisor_override": 5}))
    channels_last = image(2, dtype).to(memory_format=torch.channels_last)
    found += [(f, (channels_last.clone(), 3, 2), {}) for f in (F.avg_pool2d, F.max_pool2d)]
    return found


def groups(dtype: torch.dtype) -> list[Call]:
    weight, bias = torch.randn(6).to(dtype), torch.randn(6).to(dtype)
    found: list[Call] = []
    for count in (1, 2, 3):
        found.append((F.group_norm, (image(2, dtype), count, weight.clone(), bias.clone()), {}))
        found.append((F.group_norm, (image(2, dtype).transpose(2, 3), count), {"eps": 0.1}))
    found.append((F.group_norm, (torch.randn(4, 6).to(dtype), 3), {}))
    found.append((torch.trace, (torch.randn(5, 7).to(dtype),), {}))
    return found


def losses(dtype: torch.dtype) -> list[Call]:
    scores, weight = torch.randn(5, 6).to(dtype), torch.rand(6).to(dtype)
    classes = torch.tensor([0, 5, -100, 3, 3])
    pictures, pixels = torch.randn(5, 6, 3, 2).to(dtype), torch.randint(0, 6, (5, 3, 2))
    found: list[Call] = []
    for reduction in ("mean", "sum", "none"):
        options: dict[str, Any] = {"reduction": reduction}
        found.append((F.nll_loss, (scores.clone(), classes.clone()), options))
        found.append((F.nll_loss, (scores.clone(), classes.clone(), weight.clone()), options))
        marked = {**options, "ignore_index": 2}
        found.append((F.nll_loss, (pictures.clone(), pixels.clone()), marked))
    found.append((F.cross_entropy, (scores.clone(), classes.clone()), {"reduction": "none"}))
    marked = {"reduction": "none", "ignore_index": 2}
    found.append((F.cross_entropy, (pictures.clone(), pixels.clone()), marked))
    return found


def as_tuple(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


def tensors(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


@pytest.mark.parametrize(
    ("family", "dtype"),
    one_in(3, [pools, groups, losses], [torch.float32, torch.float64, torch.bfloat16]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_rows_are_as_exact_as_eager(family: Any, dtype: torch.dtype) -> None:
    calls, expectations = [], []
    for function, args, options in family(dtype):
        try:
            expectations.append(as_tuple(function(*args, **options)))
        except RuntimeError:  # eager has no kernel for this dtype
            continue
        calls.append((function, args, options))
    compiled, inputs, nodes = compile_all(calls, [len(e) for e in expectations])
    fused = fused_names(compiled)
    results = compiled(*inputs)
    for (function, args, options), node, expected, found in zip(
        calls, nodes, expectations, results, strict=True
    ):
        is_in_steps = function in POWERS.values() and dtype == torch.bfloat16
        assert node.name in fused or is_in_steps, (function, options)
        exact = as_tuple(function(*map(tensors, args), **options))
        for ours, eagers, true in zip(as_tuple(found), expected, exact, strict=True):
            assert (ours.dtype, ours.stride()) == (eagers.dtype, eagers.stride())
            assert error(ours, true) <= 2 * error(eagers, true) + bound(ours), (function, options)


def bound(found: torch.Tensor) -> float:
    return 16 * torch.finfo(found.dtype).eps if found.is_floating_point() else 0


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error relative to the largest number; infinite for another NaN."""
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, exact) else math.inf
    is_same = (found == exact) | (found.isnan() & exact.isnan())
    difference = (
        torch.where(is_same, 0.0, found.double() - exact).abs().nan_to_num(math.inf, math.inf)
    )
    return float(difference.max() / exact[exact.isfinite()].abs().max().clamp(min=1e-30))


def test_a_class_out_of_range_raises_as_in_eager() -> None:
    for function in (F.nll_loss, lambda x, t: F.cross_entropy(x, t, reduction="none")):
        inputs = torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 4])
        gm = fxkit.capture(function, inputs).graph_module
        compiled = to_cpp(gm, inputs, policy=ALWAYS)
        assert fused_names(compiled)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
        with pytest.raises(IndexError, match="out of bounds"):
            compiled(inputs[0], torch.tensor([0, 1, 2, 3, 6]))


MARGINS: list[dict[str, Any]] = [{}, {"p": 2, "margin": 0.5}, {"weight": torch.rand(6) - 0.2}]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", MARGINS, ids=["plain", "squares", "weights"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_margins_to_a_class(options: dict[str, Any], reduction: str, dtype: torch.dtype) -> None:
    given = {k: v.to(dtype) if k == "weight" else v for k, v in options.items()}

    def program(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.multi_margin_loss(x, target, reduction=reduction, **given)

    x, target = torch.randn(50, 6, dtype=dtype), torch.arange(50) % 6
    x[0, 1], x[1, 2], x[2, 0] = math.nan, math.inf, -math.inf
    fast = fxkit.compile(program)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x, target), program(x, target), equal_nan=True)
        assert any(region.kernel for region in fast.compiled_modules[0].regions)
        target[7] = 6
        with pytest.raises(RuntimeError, match="target"):
            fast(x, target)


def test_neighbours_join_a_norm_of_groups() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.silu(F.group_norm(x, 3)) + y

    inputs = torch.randn(2, 6, 5, 7), torch.randn(2, 6, 5, 7)
    compiled = to_cpp(fxkit.capture(program, inputs).graph_module, inputs)
    assert [len(r.nodes) for r in compiled.regions] == [3]
    torch.testing.assert_close(compiled(*inputs), program(*inputs))


def test_neighbours_join_a_pooling() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return F.relu(F.avg_pool2d(torch.exp(x), 2) - 1) * 2

    x = torch.randn(2, 3, 8, 12)
    compiled = to_cpp(fxkit.capture(program, (x,)).graph_module, (x,))
    torch.testing.assert_close(compiled(x), program(x))


def test_each_framed_row_has_a_case() -> None:
    called = {
        "trace", "group_norm", "area", "nll_loss_nd", "nll_loss", "nll_loss2d",
        "cross_entropy_loss", "multi_margin_loss", "fake_quantize_per_channel_affine_cachemask",
        *(f"{kind}max_pool{rank}d_with_indices" for kind in ("", "adaptive_")
          for rank in (1, 2, 3)),
        *(f"{kind}_pool{rank}d" for kind in ("avg", "max", "lp", "adaptive_avg", "adaptive_max")
          for rank in (1, 2, 3)),
    }  # fmt: skip
    assert called == {name.rpartition(".")[2] for name, row in TABLE.items() if row.domain}
