"""Tests that calls which can't run are told, and no others."""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import get_testing_overrides

import fxkit
from fxkit.errors import FxkitError
from fxkit.ir.call_forms import unfit_call
from fxkit.ir.types import TensorType, set_type
from tests.operator_samples import samples

_RELU = torch.ops.aten.relu


def _module(op: str, target: Any, count: int, kwargs: dict[str, Any]) -> fx.GraphModule:
    """Return a module that makes one call, with so many inputs as operands."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(count)]
    graph.output(graph.create_node(op, target, tuple(inputs), kwargs))
    return fx.GraphModule(nn.ModuleDict({"layer": nn.Linear(2, 2)}), graph)


def _function(x: Any, y: Any = 1) -> Any:
    return x + y


@pytest.mark.parametrize("verify", ["each", "structure"])
@pytest.mark.parametrize(
    ("target", "count", "kwargs", "schema"),
    [
        (torch.relu, 0, {}, "aten::relu(Tensor self)"),
        (torch.relu, 1, {"bogus": 1}, "aten::relu(Tensor self)"),
        (torch.relu, 2, {}, "aten::relu(Tensor self)"),
        (F.relu, 0, {}, "relu(input"),
        (F.relu, 1, {"bogus": 1}, "relu(input"),
        (_RELU, 0, {}, "aten::relu(Tensor self)"),
        (_RELU.default, 1, {"bogus": 1}, "aten::relu(Tensor self)"),
        (_RELU.default, 1, {"self": 1}, "aten::relu(Tensor self)"),
        (torch.add, 1, {}, "aten::add.Tensor"),
        (torch.softmax, 1, {"dimension": 1}, "aten::softmax.int"),
        (_function, 3, {}, "_function(x: Any, y: Any = 1)"),
        ("layer", 2, {}, "forward(self, input"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_what_fits(
    verify: Any, target: Any, count: int, kwargs: dict[str, Any], schema: str
) -> None:
    op = "call_module" if isinstance(target, str) else "call_function"
    gm = _module(op, target, count, kwargs)
    with pytest.raises(FxkitError) as raised:
        fxkit.PassManager([], verify=verify).run(gm)
    assert schema in str(raised.value)


def test_a_session_refuses_it_too() -> None:
    gm = fxkit.symbolic_trace(lambda x: torch.relu(x))
    before = gm.code
    with pytest.raises(FxkitError, match="aten::relu"), fxkit.edit(gm) as session:
        session.call(torch.relu, before="relu")
    assert gm.code == before


def test_a_method_of_a_known_tensor_is_held_against_its_schema() -> None:
    gm = _module("call_method", "relu", 1, {"bogus": 1})
    call = gm.graph.output_node().all_input_nodes[0]
    assert unfit_call(gm, call) is None  # whatever x0 is
    with pytest.raises(FxkitError, match="aten::relu"):
        set_type(call.all_input_nodes[0], TensorType.of(torch.ones(2)))
        fxkit.verify(gm)


def test_hooks_may_change_operands() -> None:
    gm = _module("call_module", "layer", 2, {})
    gm.get_submodule("layer").register_forward_pre_hook(lambda module, args: args[:1])
    fxkit.verify(gm)
    gm(torch.ones(2), 1)


def _called(part: int, parts: int) -> int:
    """Hold torch's own samples against what is told; return how many there were."""
    gm, count = fx.GraphModule(nn.Module(), fx.Graph()), 0
    for sample in samples(part, parts):
        taken = unfit_call(gm, sample.node)
        assert taken is None, f"{sample.name} as {sample.node.op}: {taken}"
        count += 1
    return count


def test_samples_of_torch_fit() -> None:
    assert _called(3, 40) > 50


@pytest.mark.sweep
def test_all_samples_of_torch_fit() -> None:
    assert _called(0, 1) > 5000


def _spellings() -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """Yield calls by the parameters that torch lists for its functions, right or wrong."""
    for function, stand_in in get_testing_overrides().items():
        if not isinstance(function, types.BuiltinFunctionType):
            continue
        parameters = inspect.signature(stand_in).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
        yield function, len(needed), {}
        yield function, 0, {p.name: 1 for p in needed}
        for parameter in parameters:
            if parameter.default is not parameter.empty:
                yield function, len(needed), {parameter.name: 1}


def test_what_is_refused_does_not_run() -> None:
    refused = 0
    for function, count, kwargs in _spellings():
        gm = _module("call_function", function, count, kwargs)
        if unfit_call(gm, gm.graph.output_node().all_input_nodes[0]) is None:
            continue
        refused += 1
        with pytest.raises(TypeError):
            function(*[torch.ones(2, 2)] * count, **kwargs)
    assert refused > 20
