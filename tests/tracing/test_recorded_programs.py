"""Programs of many kinds: a captured one never differs from the program itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxkit.errors import CaptureError, UnsupportedError
from fxkit.ir.provenance import module_path, module_stack, source_of
from fxkit.ir.types import type_of
from fxkit.tracing.capture_modes import capture
from tests.tracing import state_programs, tensor_programs
from tests.tracing.faithful import assert_faithful
from tests.tracing.programs import x
from tests.tracing.tensor_programs import (
    custom_function_with_a_gradient,
    recurrent_and_attention,
    weights_tied,
)

LAYER = nn.Linear(4, 4)
PROGRAMS = tensor_programs.program.made | state_programs.program.made


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_captured_is_the_program(name: str) -> None:
    make, graphs = PROGRAMS[name]
    assert_faithful(make, graphs=graphs)


@pytest.mark.parametrize("mode", ["other", "live"])
def test_unknown_mode(mode: str):
    message = f"expected mode to be one of whole, symbolic, aten, export, partial, got '{mode}'"
    with pytest.raises(UnsupportedError, match=message) as error:
        capture(torch.relu, (x(),), mode=mode)
    assert "leave it out to get 'whole'" in str(error.value)


def test_bare_tensor_for_arguments():
    with pytest.raises(UnsupportedError, match="expected args to be a tuple, got Tensor") as error:
        capture(torch.relu, x())  # type: ignore[arg-type]
    assert "(x,)" in str(error.value)


def test_keywords_that_are_no_dict():
    with pytest.raises(UnsupportedError, match="expected kwargs to be a dict or None, got list"):
        capture(torch.relu, (x(),), [1])  # type: ignore[arg-type]


def test_something_that_can_not_be_called():
    with pytest.raises(UnsupportedError, match="expected something callable, got int"):
        capture(3, (x(),))  # type: ignore[arg-type]


def test_nodes_carry_types_lines_and_modules():
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())

    def fn(a):
        return net(a) + 1

    nodes = {node.name: node for node in capture(fn, (x(2, 4),)).graph_module.graph.nodes}
    assert list(nodes) == ["a", "net_0_weight", "net_0_bias", "linear", "relu", "add", "output"]
    assert str(type_of(nodes["linear"])) == "f32[2,3]"
    assert module_path(nodes["relu"]) == "net.1"
    assert [path for path, _ in module_stack(nodes["linear"])] == ["net", "net.0"]
    source = source_of(nodes["linear"])
    assert source is not None and source.line == fn.__code__.co_firstlineno + 1
    assert source.function == "fn"


def test_values_that_depend_on_data_are_marked():
    graph = capture(lambda a: (a[a > 0] + 1, a * 2), (x(),)).graph_module.graph
    marked = [node.name for node in graph.nodes if node.meta.get("fxkit_data_dependent")]
    assert marked == ["getitem", "add"]


def test_weights_that_are_tied_are_one_attribute():
    fn, (args, _) = weights_tied()
    graph = capture(fn, args).graph_module.graph
    assert [node.target for node in graph.nodes if node.op == "get_attr"] == ["embed.weight"]


def test_names_are_the_same_each_time():
    fn, (args, _) = recurrent_and_attention()
    assert capture(fn, args).graph_module.code == capture(fn, args).graph_module.code


def test_custom_function_without_a_gradient_is_seen_through():
    fn, _ = custom_function_with_a_gradient()
    with torch.no_grad():
        captured = capture(fn, (x(),))
    assert [node.name for node in captured.nodes] == ["a", "mul", "add", "output"]


def _takes_keywords() -> bool:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.clone()

    try:
        Same.apply(a=torch.ones(1))
    except TypeError:
        return False
    return True


def _keyword_of_a_custom_function(a: torch.Tensor) -> torch.Tensor:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, factor):
            return a * factor

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None

    return Scale.apply(a, factor=2.0)


def _copied_layer(a: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(LAYER)(a)


def _random_state_set(a: torch.Tensor) -> torch.Tensor:
    noise = torch.rand(4)
    torch.random.set_rng_state(torch.Generator().manual_seed(3).get_state())
    return a + noise + torch.rand(4)


@pytest.mark.parametrize(
    ("fn", "reason", "hint"),
    [
        (_copied_layer, r"tensor f32\[4,4\] of unknown origin", "pass it as an argument"),
        (_random_state_set, "random state changes between", "seed the generators before"),
        pytest.param(
            _keyword_of_a_custom_function,
            "Scale has a backward of its own",
            "no_grad",
            marks=pytest.mark.skipif(
                not _takes_keywords(), reason="this torch calls functions without keywords"
            ),
        ),
    ],
)
def test_refusals_say_why_and_what_to_do(fn: Callable[..., Any], reason: str, hint: str):
    with pytest.raises(CaptureError, match=reason) as error:
        capture(fn, (torch.ones(4, requires_grad=True),))
    assert hint in str(error.value)


def test_a_tensor_subclass_among_the_arguments_is_named():
    fn, calls = PROGRAMS["subclass_among_the_arguments"][0]()
    with pytest.raises(CaptureError, match=r"args\[0\] is a .*Marked, a tensor subclass"):
        capture(fn, calls[0])
