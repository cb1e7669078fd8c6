"""Reference graphs leave fxkit: by torch.export, and as QDQ that ONNX Runtime runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxkit import quantization as q

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torch.export about itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the exporter to ONNX
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SPECS = {
    "static": q.int8_static(),
    "static symmetric": q.int8_static(scheme="symmetric"),
    "static per tensor": q.int8_static(weights="per_tensor"),
    "weight only": q.int8_weight_only(),
    "dynamic": q.int8_dynamic(),
    "four bits": q.int4_weight_only(4),
}
AS_QDQ = ("static", "static symmetric", "static per tensor", "weight only")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)
        self.hidden, self.head = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.second(F.relu(self.first(x))))
        return self.head(F.gelu(self.hidden(y.mean((2, 3)))))


def quantized(name: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 10, 10)
    return q.quantize(Network().eval(), SPECS[name], [(x,), (torch.randn(2, 3, 10, 10),)]), x


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_torch_export_takes_them(name: str) -> None:
    program, x = quantized(name)
    exported = torch.export.export(program.graph_module, (x,)).module()
    assert torch.equal(exported(x), program(x))


@torch.no_grad()
def test_torch_export_takes_a_decoder_that_looks_at_its_positions() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 50}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2Model(config).eval()
    ids = torch.arange(24).view(2, 12)
    config = q.QuantizationConfig(q.int8_static(), by_operator={F.embedding: None})
    program = q.quantize(model, config, [{"input_ids": ids, "use_cache": False}])
    exported = torch.export.export(program.graph_module, (), {"input_ids": ids}).module()
    found, expected = exported(input_ids=ids), program(input_ids=ids, use_cache=False)
    assert torch.equal(next(iter(_tensors(found))), next(iter(_tensors(expected))))


@torch.no_grad()
def test_checks_of_what_buffers_say_stay() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("is_on", torch.tensor(True))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if self.is_on else x

    model, x = Choice().eval(), torch.randn(2, 8)
    program = q.quantize(model, q.int8_static(), [(x,)])
    assert not torch.equal(program(x), x)
    model.is_on.fill_(False)
    assert torch.equal(program(x), x)


def _tensors(result: Any) -> list[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, Tensor)]


@pytest.mark.parametrize("name", AS_QDQ)
@torch.no_grad()
def test_onnx_runtime_computes_the_same_numbers(name: str) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    program, x = quantized(name)
    model = torch.onnx.export(program.graph_module, (x,), dynamo=True, verbose=False).model_proto
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("DequantizeLinear") == (4 if name == "weight only" else 8)
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = runtime.SessionOptions()
        options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, level)
        session = runtime.InferenceSession(model.SerializeToString(), options)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), program(x), rtol=1e-5, atol=1e-5)
