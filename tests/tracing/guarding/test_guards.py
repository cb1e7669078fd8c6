"""Each kind of guard fails when, and only when, what it guards has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxkit.tracing.capture_modes import capture
from fxkit.tracing.captured import Captured
from fxkit.tracing.guarding.aliasing_guards import AliasGuard
from fxkit.tracing.guarding.guards import (
    GuardFailed,
    OutsideGuard,
    ValueGuard,
    check_value,
    is_same,
)
from fxkit.tracing.guarding.module_guards import ModuleGuard


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.table = torch.ones(4)

    def forward(self, a: torch.Tensor, scale: Any = 1, extra: Any = None) -> torch.Tensor:
        return self.drop(self.layer(a)) * self.table * scale


def _net() -> tuple[Net, Captured]:
    net = Net().eval()
    return net, capture(net, (torch.ones(2, 4),), {"scale": 2})


def _expect(captured: Captured, text: str, *args: Any, **kwargs: Any) -> None:
    explanation = captured.explain(*args, **kwargs)
    assert text in explanation, explanation
    graphs = len(captured.graphs)
    expected, got = captured.fn(*args, **kwargs), captured(*args, **kwargs)
    assert torch.equal(expected, got)
    assert len(captured.graphs) == graphs + 1


def test_a_dict_that_is_taken_whole_may_be_another_one() -> None:
    captured = capture(lambda found: found[torch.float32] * 2, ({torch.float32: torch.ones(2)},))
    other = {torch.float32: torch.zeros(2)}
    _expect(captured, "an object of type dict", other)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a[:1], "expected args[0] to be f32[2,4] on cpu, got f32[1,4] on cpu"),
        (lambda a: a.double(), "got f64[2,4] on cpu"),
        (lambda a: a.t().contiguous().t(), "got f32[2,4] with strides (1, 2) on cpu"),
        (lambda a: a.clone().requires_grad_(), "requiring grad"),
        (lambda a: nn.Parameter(a.clone()), "of class Parameter"),
    ],
)
def test_type_of_a_tensor(change: Callable[[torch.Tensor], torch.Tensor], text: str):
    def fn(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    captured = capture(fn, (torch.ones(2, 4),))
    _expect(captured, text, change(torch.ones(2, 4)))
    line = fn.__code__.co_firstlineno + 1
    assert f"test_guards.py:{line} in fn" in captured.explain(torch.ones(7))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "expected scale to be 2, got 3"),
        (2.0, "expected scale to be 2, got 2.0"),
        (True, "expected scale to be 2, got True"),
        (torch.tensor(2), "expected scale to be 2, got a tensor"),
    ],
)
def test_value_that_is_no_tensor(value: Any, text: str):
    _, captured = _net()
    _expect(captured, text, torch.ones(2, 4), scale=value)


def test_number_of_arguments():
    _, captured = _net()
    _expect(captured, "expected the arguments to be", torch.ones(2, 4), scale=2, extra=None)


def test_order_of_keywords_does_not_matter():
    _, captured = _net()
    captured(torch.ones(2, 4), scale=2, extra=1)
    captured(torch.ones(2, 4), extra=1, scale=2)
    assert captured.recaptures == 1


def test_nan_as_an_argument_equals_nan():
    captured = capture(lambda a, b: a * b, (torch.ones(2), math.nan), dynamic=False)
    captured(torch.ones(2), float("nan"))
    assert captured.recaptures == 0
    captured(torch.ones(2), 0.0)
    captured(torch.ones(2), -0.0)
    assert captured.recaptures == 2


def test_training_flag_of_a_submodule():
    net, captured = _net()
    net.drop.train()
    assert "expected drop to be in evaluation mode, got in training mode" in captured.explain(
        torch.ones(2, 4), scale=2
    )
    torch.manual_seed(0)
    expected = net(torch.ones(2, 4), scale=2)
    torch.manual_seed(0)
    assert torch.equal(captured(torch.ones(2, 4), scale=2), expected)


def test_submodule_that_is_replaced():
    net, captured = _net()
    net.drop = nn.ReLU()
    _expect(captured, "other submodules", torch.ones(2, 4), scale=2)


def test_hook_that_is_added():
    net, captured = _net()
    net.layer.register_forward_hook(lambda module, args, result: result + 1)
    _expect(captured, "other hooks", torch.ones(2, 4), scale=2)


def test_parameter_that_is_replaced():
    net, captured = _net()
    net.layer.weight = nn.Parameter(torch.ones(4, 4))
    _expect(captured, "expected layer.weight to be f32[4,4] on cpu", torch.ones(2, 4), scale=2)


def test_parameter_that_changes_its_type_in_place():
    net, captured = _net()
    net.double()
    net.table = net.table.double()
    _expect(captured, "got f64[2,4]", torch.ones(2, 4, dtype=torch.double), scale=2)
    net.float()
    net.layer.weight.requires_grad_(False)
    assert "expected" in captured.explain(torch.ones(2, 4), scale=2)


def test_parameter_that_changes_its_numbers_needs_no_new_graph():
    net, captured = _net()
    with torch.no_grad():
        net.layer.weight.add_(1)
    assert torch.equal(captured(torch.ones(2, 4), scale=2), net(torch.ones(2, 4), scale=2))
    assert captured.recaptures == 0


def test_tensor_attribute_that_is_replaced():
    net, captured = _net()
    net.table = torch.zeros(4)
    _expect(captured, "expected table to be f32[4] on cpu, got another", torch.ones(2, 4), scale=2)


def test_tensor_in_a_closure_that_is_replaced():
    table = torch.ones(3)

    def fn(a: torch.Tensor) -> torch.Tensor:
        return a * table

    captured = capture(fn, (torch.ones(3),))
    table = torch.zeros(3)
    _expect(captured, "expected table to be f32[3] on cpu, got another tensor", torch.ones(3))


def test_modes_of_the_caller():
    _, captured = _net()
    with torch.no_grad():
        _expect(captured, "got grad off", torch.ones(2, 4), scale=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _expect(captured, "autocast cpu to torch.bfloat16", torch.ones(2, 4), scale=2)
    with torch.inference_mode():
        _expect(captured, "inference mode", torch.ones(2, 4), scale=2)


def test_default_dtype():
    captured = capture(lambda a: a + torch.ones(3), (torch.ones(3),))
    torch.set_default_dtype(torch.float64)
    try:
        _expect(captured, "default dtype torch.float64", torch.ones(3))
    finally:
        torch.set_default_dtype(torch.float32)


def test_default_device():
    captured = capture(lambda a: a.shape[0] + torch.ones(3).shape[0], (torch.ones(3),))
    with torch.device("meta"):
        assert "default device meta" in captured.explain(torch.ones(3, device="cpu"))


def test_identity_of_arguments():
    captured = capture(lambda a, b: a * b if a is b else a + b, (torch.ones(3), torch.ones(3)))
    shared = torch.full((3,), 3.0)
    _expect(captured, "shared: tensor 1 with 0", shared, shared)


def test_memory_of_arguments_where_one_is_written_to():
    captured = capture(lambda a, b: a.mul_(2) + b, (torch.ones(3), torch.ones(3)))
    base = torch.ones(4)
    assert "memory of the tensor arguments" in captured.explain(base[:3], base[1:])


def test_argument_that_is_a_parameter():
    net = nn.Linear(3, 3)

    def fn(a: torch.Tensor) -> torch.Tensor:
        return net(a).sum() + net.weight.sum()

    captured = capture(fn, (net.weight,))
    other = nn.Parameter(torch.zeros(3, 3))
    _expect(captured, "another tensor", other)


def test_value_guard_names_the_line_and_both_values():
    def fn(a: torch.Tensor) -> torch.Tensor:
        if a.sum() > 0:
            return a
        return -a

    captured = capture(fn, (torch.ones(3),))
    line = fn.__code__.co_firstlineno + 1
    text = captured.explain(-torch.ones(3))
    assert "to be True, got False" in text
    assert f"test_guards.py:{line} in fn" in text


def test_graph_module_alone_raises_when_a_value_differs():
    captured = capture(lambda a: a.item() + a, (torch.tensor(1.0),))
    with pytest.raises(GuardFailed, match=r"to be 1.0, got 2.0") as error:
        captured.graph_module(torch.tensor(2.0))
    assert "call the Captured program" in str(error.value)


def test_torch_keeps_the_guards_when_it_removes_dead_code():
    captured = capture(lambda a: a * 2 if a.sum() > 0 else a, (torch.ones(3),))
    captured.graph_module.graph.eliminate_dead_code()
    assert any(node.target is check_value for node in captured.graph_module.graph.nodes)


def test_guards_describe_themselves():
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(a) + b if b.sum() > 0 else a

    captured = capture(fn, (torch.ones(3), torch.ones(3)))
    kinds = {type(guard): guard.describe() for guard in captured.guards}
    assert kinds[AliasGuard] == "identity of the tensor arguments is all distinct"
    assert kinds[ValueGuard].startswith("bool_1 is True  (test_guards.py:")
    _, captured = _net()
    kinds = {type(guard): guard.describe() for guard in captured.guards}
    assert kinds[ModuleGuard] == "drop is Dropout in evaluation mode"
    assert kinds[OutsideGuard].startswith("table is f32[4] on cpu  (test_guards.py:")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (math.nan, math.nan, True),
        (0.0, -0.0, False),
        ([1, [math.nan]], [1, [math.nan]], True),
        ([1, 2], [1], False),
        (torch.Size([1, 2]), (1, 2), True),
        (complex(math.nan, 1), complex(math.nan, 1), True),
        (complex(0.0, 1), complex(-0.0, 1), False),
        (None, None, True),
        ("a", "b", False),
    ],
)
def test_values_are_compared_exactly(one: Any, other: Any, same: bool):
    assert is_same(one, other) is same
