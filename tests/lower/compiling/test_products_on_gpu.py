"""Quantised layers on a GPU: torch's library multiplies, kernels compute what is around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fxkit
from fxkit.ir.op import resolve
from fxkit.ir.types import set_type, type_of_value
from fxkit.lower.compiling.cuda_lowering import INTEGER_PASSES
from fxkit.lower.compiling.library_integer_products import (
    CallIntegerProducts,
    reason_to_stay_float,
)
from fxkit.lower.compiling.token_scales import Factor
from fxkit.lower.families.integer_products import custom_op
from fxkit.passes.manager.manager import PassManager
from fxkit.quantization import (
    QuantizationSpec,
    int4_weight_only,
    int8_dynamic,
    int8_static,
    int8_weight_only,
)
from tests.lower.codegen.cuda.on_cpu import ShimLowering


def small(spec: QuantizationSpec) -> QuantizationSpec:
    """Let pairs of products fit into 16 bits: torch's own product saturates without VNNI."""
    return replace(spec, weights=replace(spec.weights, low=-63, high=63, is_pair_safe=False))


SPECS = {
    "static": small(int8_static()),
    "signed": small(int8_static(scheme="symmetric", weights="per_tensor")),
    "dynamic": small(int8_dynamic()),
    "weights": int8_weight_only(),
    "nibbles": int4_weight_only(group_size=32),
}
MULTIPLY_INTEGERS = ("static", "signed", "dynamic")


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval()


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16)
    ).eval()


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval()


def quantized(model: nn.Module, args: tuple[Tensor, ...], spec: Any) -> Any:
    prepared = fxkit.quantization.prepare(model, args, spec)
    prepared(*args)
    return fxkit.quantization.convert(prepared)


def products(gm: fx.GraphModule) -> int:
    calls = map(resolve, gm.graph.nodes)
    return sum(call is not None and call.name == "aten._int_mm" for call in calls)


def close(found: Tensor, expected: Tensor) -> bool:
    """Tell whether results agree but for few elements that were rounded to the next step."""
    far = (found - expected).abs() > 1e-5 * expected.abs().max()
    return bool(far.double().mean() <= 0.05 and (found - expected).abs().max() < 0.05)


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("points", ["none", "one", "rows"])
def test_products_are_those_of_the_operator(rows: int, dtype: torch.dtype, points: str) -> None:
    # Half of the range, as in `small`.
    low, high = (64, 192) if dtype == torch.uint8 else (-64, 64)
    left = torch.randint(low, high, (rows, 72)).to(dtype)
    right = torch.randint(-64, 64, (24, 72)).to(torch.int8)
    zeros = torch.randint(low, high, (rows, 1)).int() if points == "rows" else None
    zero = 100 if points == "one" else 0

    def program(x: Tensor, y: Tensor, zeros: Tensor | None = None) -> Tensor:
        return custom_op.operator()(x, y.t(), zeros, zero)

    args = (left, right) if zeros is None else (left, right, zeros)
    gm = fxkit.capture(program, args).graph_module
    PassManager((CallIntegerProducts(),), args=args).run(gm)
    assert products(gm) == 1
    exact = (left.long() - (zero if zeros is None else zeros.long())) @ right.long().t()
    assert torch.equal(gm(*args).long(), exact)


@pytest.mark.parametrize("name", SPECS)
def test_quantised_layers_multiply_integers_and_fuse_what_is_around(
    name: str, tmp_path: Path
) -> None:
    model, args = layers(), (torch.randn(24, 64),)
    reference = quantized(model, args, SPECS[name])
    with torch.no_grad():
        gm = fxkit.capture(reference, args).graph_module
        module = ShimLowering(tmp_path).changed(gm, args)
        found, expected = module(*args), reference(*args)
    assert close(found, expected)
    assert products(gm) == (2 if name in MULTIPLY_INTEGERS else 0)
    in_eager = [r for r in module.regions if r.kernel is None]
    left = ("linear", "sum")  # the library's, and one kernel in eager too
    assert all(node.startswith(left) for region in in_eager for node in region.nodes)
    lines = str(module.report()).splitlines()
    stays = [line for line in lines if "stays in floating point" in line]
    assert len(stays) == (0 if name in MULTIPLY_INTEGERS else 2)


@pytest.mark.parametrize(
    ("columns", "depth", "reason"),
    [(24, 64, None), (20, 64, "not both multiples"), (24, 60, "not both"), (8, 72_000, "32 bits")],
)
def test_sizes_that_the_library_refuses_stay_in_float(
    columns: int, depth: int, reason: str | None
) -> None:
    gm = fxkit.symbolic_trace(lambda x, y: x)
    x, y, *_ = gm.graph.nodes
    types = (torch.empty(4, depth, dtype=torch.int8), torch.empty(columns, depth, dtype=torch.int8))
    for node, value in zip((x, y), types, strict=True):
        set_type(node, type_of_value(value))
    found = reason_to_stay_float(x, Factor(x, 0.1, 0), Factor(y, 0.1, 0))
    assert (found is None) if reason is None else reason in str(found)


def test_layers_on_the_processor_stay_as_they_are_beside_a_gpu() -> None:
    args = (torch.randn(24, 64),)
    gm = fxkit.capture(quantized(layers(), args, SPECS["static"]), args).graph_module
    result = PassManager(INTEGER_PASSES, args=args).run(gm)
    assert "it is on cpu" in "".join(n for r in result.records for n in r.notes)
    assert not products(gm)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 24])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("model", [layers, images, attention])
def test_quantised_models_run_on_a_gpu(model: Any, name: str, rows: int) -> None:
    shape = {layers: (64,), images: (3, 9, 9), attention: (5, 64)}[model]
    args = (torch.randn(rows, *shape, device="cuda"),)
    reference = quantized(model().cuda(), args, SPECS[name])
    compiled = fxkit.compile(reference)
    with torch.no_grad():
        for _ in range(3):
            assert close(compiled(*args), reference(*args))
    (module,) = compiled.compiled_modules
    assert (products(module.graph_module) > 0) == (name in MULTIPLY_INTEGERS)
