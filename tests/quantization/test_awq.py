"""AWQ: columns that large inputs meet are rounded less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import signal_to_noise


class Block(nn.Module):
    """Two layers share an input, some of whose channels are large, and one has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.last = nn.Linear(64, 16)
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight[:, 5::16] /= 8

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)) + self.second(x))


def batches(count: int) -> list[tuple[Tensor]]:
    torch.manual_seed(3)
    size = 1 + 29 * (torch.arange(64) % 16 == 5)
    causes = torch.randn(16, 64) * size
    return [(torch.randn(64, 16) @ causes + 0.1 * torch.randn(64, 64),) for _ in range(count)]


def error(model: Any, program: Any, spec: Any, data: list[tuple[Tensor]]) -> float:
    quantized: Any = q.quantize(program, spec, data)
    with torch.no_grad():
        pairs = [(model(*batch), quantized(*batch)) for batch in data]
    exact, found = (torch.cat(one) for one in zip(*pairs, strict=True))
    return signal_to_noise(exact, found)


@pytest.mark.parametrize("spec", [q.int4_weight_only(32), q.int4_weight_only(64)], ids=str)
def test_large_inputs_cost_less(spec: q.QuantizationSpec) -> None:
    torch.manual_seed(0)
    model, data = Block().eval(), batches(6)
    scaled: Any = q.awq(model, spec, data[:4])
    plain = error(model, model, spec, data[4:])
    assert plain < 22  # visibly off
    assert error(model, scaled, spec, data[4:]) > plain + 3
    with torch.no_grad():
        for rows in (64, 3):
            x = torch.randn(rows, 64)
            torch.testing.assert_close(scaled(x), model(x), rtol=1e-4, atol=1e-4)
    names = [str(node.target) for node in scaled.graph_module.graph.find_nodes(op="get_attr")]
    assert sum(name.startswith("smoothing") for name in names) == 2  # one for each input


def test_it_goes_together_with_gptq() -> None:
    torch.manual_seed(0)
    model, data, spec = Block().eval(), batches(6), q.int4_weight_only(32)
    scaled = q.awq(model, spec, data[:4])
    prepared = q.prepare(scaled, data[0], spec)
    q.gptq(prepared, data[:4])
    quantized: Any = q.convert(prepared)
    with torch.no_grad():
        found = signal_to_noise(model(*data[5]), quantized(*data[5]))
    assert found > error(model, scaled, spec, data[5:]) + 1


def test_what_stays_in_float_is_not_scaled() -> None:
    model, data = Block().eval(), batches(2)
    config = q.QuantizationConfig(
        q.int4_weight_only(32), by_module={"second": None, "last": q.int4_weight_only(48)}
    )
    scaled: Any = q.awq(model, config, data)
    names = [str(node.target) for node in scaled.graph_module.graph.find_nodes(op="get_attr")]
    assert not any(name.startswith("smoothing") for name in names)  # 64 has no groups of 48
    assert torch.equal(scaled(*data[0]), model(*data[0]))
    zeros = [(torch.zeros(2, 64),)]
    same: Any = q.awq(model, q.int4_weight_only(16), zeros)
    torch.testing.assert_close(same(*data[0]), model(*data[0]), rtol=1e-4, atol=1e-4)


def test_faults_of_the_caller() -> None:
    with pytest.raises(UnsupportedError, match="got none"):
        q.awq(Block().eval(), q.int4_weight_only(16), [])
    with pytest.raises(UnsupportedError, match="QuantizationConfig"):
        q.awq(Block().eval(), "int4", batches(1))  # type: ignore[arg-type]
