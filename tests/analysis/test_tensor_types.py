"""Types worked out on fake tensors are those of a real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fxkit.analysis.tensor_types import infer_type, propagate_types
from fxkit.errors import InvalidGraphError
from fxkit.ir.types import KEY, type_of, type_of_value
from fxkit.tracing.symbolic import symbolic_trace


class _Recorder(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.types: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.types[n] = type_of_value(result)
        return result


def _mixed(x: torch.Tensor, y: torch.Tensor) -> Any:
    parts = x.split(2, dim=1)
    best, where = (x + y.t()).topk(2)
    y.add_(1)
    return {"a": parts[1].t() @ y[:3, :2], "b": best.half(), "c": where > 0, "n": x.shape[0]}


_MODELS: dict[str, tuple[Callable[[], Any], list[torch.Tensor]]] = {
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(),
                              nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)).eval(),
        [torch.randn(2, 3, 14, 14)],
    ),
    "training": (lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.GELU()),
                 [torch.randn(5, 4)]),
    "channels last": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU()), [
        torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)]),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4)),
                  [torch.tensor([[1, 2, 3]])]),
    "mixed": (lambda: _mixed, [torch.randn(3, 4), torch.randn(4, 3)]),
    "attention": (lambda: lambda q: F.scaled_dot_product_attention(q, q, q).transpose(1, 2),
                  [torch.randn(2, 3, 5, 8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_MODELS))
@torch.no_grad()
def test_types_are_those_of_a_real_run(name: str) -> None:
    make, args = _MODELS[name]
    gm = symbolic_trace(make())
    state = torch.get_rng_state()
    before = [arg.clone() for arg in args]
    statistics = {key: value.clone() for key, value in gm.state_dict().items()}
    result = propagate_types(gm, tuple(args))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))
    assert all(torch.equal(value, statistics[key]) for key, value in gm.state_dict().items())
    recorder = _Recorder(gm)
    real = recorder.run(*[arg.clone() for arg in args])
    assert result == type_of_value(real)
    assert {n.name: type_of(n) for n in recorder.types} == {
        n.name: known for n, known in recorder.types.items()
    }


@pytest.mark.parametrize("name", sorted(_MODELS))
@torch.no_grad()
def test_one_node_at_a_time_gives_the_same(name: str) -> None:
    make, args = _MODELS[name]
    gm = symbolic_trace(make())
    propagate_types(gm, tuple(args))
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        known = node.meta.pop(KEY)
        assert infer_type(node) == known
        assert type_of(node) == known


def test_unknown_operands_give_no_type() -> None:
    gm = symbolic_trace(lambda x: torch.relu(x))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert infer_type(node) is None
    assert KEY not in node.meta


def test_a_misfit_names_node_line_and_operands() -> None:
    gm = symbolic_trace(lambda x, y: (x + 1) @ y)
    with pytest.raises(InvalidGraphError) as caught:
        propagate_types(gm, (torch.randn(2, 3), torch.randn(4, 5)))
    text = str(caught.value)
    assert "expected operands that matmul can take, got %add: f32[2,3], %y: f32[4,5]" in text
    assert "test_tensor_types.py:" in text
    assert "hint:" in text


def test_keyword_inputs() -> None:
    gm = symbolic_trace(lambda x, y: x * y)
    assert propagate_types(gm, (torch.ones(2, 1),), {"y": torch.ones(3)}).shape == (2, 3)
