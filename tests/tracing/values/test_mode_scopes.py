"""The nodes that follow the program's modes, and the way back when a call raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxkit.tracing.capture_modes import capture
from fxkit.tracing.values.mode_scopes import RegionModes, Regions, read_ambient


def _targets(fn: Any) -> list[str]:
    graph = capture(fn, (torch.ones(2, 2),)).graph_module.graph
    names = [getattr(node.target, "__name__", str(node.target)) for node in graph.nodes]
    return [name for name in names if name.startswith("_")]


def test_nested_regions_are_left_in_order():
    def fn(a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = a @ a
            with torch.autocast("cpu", enabled=False):
                c = a @ a
            d = a @ a
        return b + c + d

    assert _targets(fn) == [
        "_enter_autocast",
        "_enter_autocast",
        "_exit_autocast",
        "_exit_autocast",
    ]


def test_gradient_of_a_weight_whose_cast_is_cached_across_a_nested_region():
    layer = torch.nn.Linear(4, 4)

    def fn(a: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = layer(a)
            with torch.autocast("cpu", enabled=False):
                c = layer(a)
            return layer(b) + c

    captured = capture(fn, (torch.rand(3, 4),))
    a, gradients = torch.rand(3, 4), []
    for run in (fn, captured):
        layer.zero_grad()
        run(a).float().square().sum().backward()
        assert layer.weight.grad is not None
        gradients.append(layer.weight.grad.clone())
    assert captured.recaptures == 0
    assert torch.equal(*gradients)


def test_regions_without_calls_leave_no_nodes():
    def fn(a: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            pass
        return a + 1

    assert _targets(fn) == []


def test_inference_region():
    def fn(a: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            b = a * 2
        return a + b.shape[0]

    assert _targets(fn) == ["_enter_inference_mode", "_exit_inference_mode"]


def test_gradient_mode_goes_with_inference_mode():
    def emit(target: Any, args: Any) -> Any:
        emitted.append(target.__name__)

    emitted: list[str] = []
    regions = Regions(emit, read_ambient())
    with torch.inference_mode():
        regions.follow(read_ambient())
    regions.follow(read_ambient())
    assert emitted == ["_enter_inference_mode", "_exit_inference_mode"]
    with torch.no_grad():
        regions.follow(read_ambient())
    assert emitted[2:] == ["_set_grad_enabled"]


def test_modes_are_put_back():
    modes = RegionModes.now()
    context = torch.autocast("cpu", dtype=torch.float16, cache_enabled=False)
    context.__enter__()
    torch.set_grad_enabled(False)
    modes.restore(ValueError())
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert torch.is_autocast_cache_enabled()
    assert RegionModes.now() == modes


@pytest.mark.parametrize("enabled", [True, False])
def test_ambient_as_text(enabled: bool):
    with torch.set_grad_enabled(enabled), torch.autocast("cpu", dtype=torch.bfloat16):
        text = str(read_ambient())
    assert text == f"grad {'on' if enabled else 'off'}, autocast cpu to torch.bfloat16"
