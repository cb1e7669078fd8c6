"""Exported: `torch.export` keeps an operator of one's own, ONNX gets it spelled out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxkit
from fxkit.passes.decomposition.core_operators import is_core
from fxkit.torch_adapters.decompositions import whole_table
from fxkit.torch_adapters.operators import OpOverload

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # by torch.export


@fxkit.operator(namespace="exported")
def shrunk(x, width=0.5):
    if abs(x) > width:
        return x - math.copysign(width, x)
    return math.hypot(x, 1.0) - 1.0 if x > 0 else x * (width * width / 6.0)


@fxkit.row_operator(namespace="exported")
def normed(row, weight, eps=1e-6):
    scale = 1 / math.sqrt(row.mean(lambda x: x * x) + eps)
    return [x * scale * w for x, w in zip(row, weight, strict=True)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normed(shrunk(self.linear(x), width=0.25), self.weight)


def called(gm: Any) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_torch_export_keeps_it() -> None:
    model, x = Model().eval(), torch.randn(4, 8)
    sizes = {"x": {0: torch.export.Dim("batch")}}
    exported = torch.export.export(model, (x,), dynamic_shapes=sizes)
    exported = exported.run_decompositions()
    assert {shrunk.overload, normed.overload} <= set(called(exported))
    x = torch.randn(7, 8)
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize("operator", [shrunk, normed], ids=lambda op: op.__name__)
def test_torch_knows_how_it_is_spelled_out(operator: Any) -> None:
    args = [torch.randn(4, 8) for _ in operator.definition.tensors]
    table = {operator.overload: whole_table()[operator.overload]}
    gm = make_fx(lambda *xs: operator.overload(*xs), table, "fake")(*args)
    overloads = [target for target in called(gm) if isinstance(target, OpOverload)]
    assert overloads
    assert all(is_core(overload) for overload in overloads)
    torch.testing.assert_close(gm(*args), operator(*args))


def test_a_withdrawn_operator_is_in_no_table() -> None:
    def passing(x):
        return x * 2.0

    before = fxkit.operator(namespace="exported")(passing)
    assert before.overload in whole_table()
    after = fxkit.operator(namespace="exported")(passing)
    assert before.overload is not after.overload
    assert before.overload not in whole_table()


@pytest.mark.filterwarnings("ignore")  # by the exporter
def test_onnx_has_it_spelled_out() -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = Model().eval(), torch.randn(4, 8)
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x))
