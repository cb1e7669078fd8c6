"""Interpolation in kernels, against eager and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lower.kernels import compile_all, fused_names
from tests.sampling import Sample

MODES = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear", "area"),
}


def forms(rank: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"size": size[:rank]} for size in ((7, 20, 5), (1, 1, 1))]
    found += [{"scale_factor": factor} for factor in (2, 1.7, 0.6)]
    found.append({"scale_factor": 1.3, "recompute_scale_factor": True})
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_interpolation_is_as_exact_as_eager(dtype: torch.dtype, some: Sample) -> None:
    calls: list[Any] = []
    for rank, modes in MODES.items():
        x = torch.randn(2, 3, *(13, 9, 6)[:rank], dtype=dtype)
        for mode in modes:
            aligned = [{}] if mode in ("nearest", "nearest-exact", "area") else [
                {}, {"align_corners": True},
            ]  # fmt: skip
            calls += [
                (F.interpolate, (x.clone(),), {**form, **corners, "mode": mode})
                for form in some(forms(rank), 3)
                for corners in aligned
                if (mode, form) != ("area", {"scale_factor": 2})  # windows of single elements
            ]
    compiled, inputs, nodes = compile_all(calls)
    assert {node.name for node in nodes} <= fused_names(compiled)
    for (function, args, options), found in zip(calls, compiled(*inputs), strict=True):
        expected = function(*args, **options)
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())
        if options["mode"].startswith("nearest"):
            assert torch.equal(found, expected), options
            continue
        exact = function(args[0].double(), **options)
        ours, eagers = ((t.double() - exact).abs().max() for t in (found, expected))
        assert ours <= 2 * eagers + 32 * torch.finfo(dtype).eps, options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_of_16_bits_only_the_nearest_is_fused(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 13, 9).to(dtype)
    options: list[dict[str, Any]] = [{"mode": "nearest"}, {"mode": "bilinear"}]
    calls: list[Any] = [(F.interpolate, (x,), {"scale_factor": 1.7, **o}) for o in options]
    compiled, inputs, nodes = compile_all(calls)
    assert fused_names(compiled) == {nodes[0].name}
    for (function, args, given), found in zip(calls, compiled(*inputs), strict=True):
        assert torch.equal(found, function(*args, **given))
