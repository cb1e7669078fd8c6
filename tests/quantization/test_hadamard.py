"""Rotated inputs: the same program, in which no channel is much larger than the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import signal_to_noise
from fxkit.quantization.rotations import is_rotation, rotation


class Block(nn.Module):
    """Two layers share an input with three huge channels that matter little."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 48), nn.Linear(width, 48, bias=False)
        self.last = nn.Linear(48, 15)
        self.size = torch.ones(width)
        self.size[:3] = 60
        with torch.no_grad():
            for layer in (self.first, self.second):
                layer.weight[:, :3] /= 30

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.size
        return self.last(torch.relu(self.first(x)) + self.second(x))


def error(model: Any, program: Any, spec: Any, data: list[tuple[Tensor]]) -> float:
    quantized: Any = q.quantize(program, spec, data)
    with torch.no_grad():
        pairs = [(model(*batch), quantized(*batch)) for batch in data]
    exact, found = (torch.cat(one) for one in zip(*pairs, strict=True))
    return signal_to_noise(exact, found)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_a_rotation_is_orthogonal_and_told_from_other_matrices(size: int) -> None:
    matrix = rotation(size)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(size, dtype=torch.float64))
    assert is_rotation(matrix) and is_rotation(matrix.half())
    assert not is_rotation(matrix * torch.rand(size)) and not is_rotation(torch.ones(size, size))
    assert not is_rotation(torch.ones(1, 1)) and not is_rotation(torch.zeros(size, size))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_huge_channels_cost_less(kind: str) -> None:
    torch.manual_seed(0)
    model = Block().eval()
    data = [(torch.randn(20, 96),) for _ in range(4)]

    make = q.int8_static if kind == "static" else q.int8_dynamic
    spec = make(pair_safe=False)  # whose scales follow other elements than the largest
    rotated: Any = q.rotate_inputs(model, data[0])
    with torch.no_grad():
        for rows in (20, 3):
            x = torch.randn(rows, 96)
            torch.testing.assert_close(rotated(x), model(x), rtol=1e-4, atol=1e-4)
    plain = error(model, model, spec, data)
    assert plain < 20  # visibly off
    assert error(model, rotated, spec, data) > plain + 5


def test_the_rotation_itself_stays_in_float_and_compiles() -> None:
    torch.manual_seed(0)
    model, data = Block(64).eval(), [(torch.randn(5, 2, 64),)]
    prepared = q.prepare(q.rotate_inputs(model, data[0]), data[0], q.int8_static())
    q.calibrate(prepared, data)
    quantized: Any = q.convert(prepared)
    rows = [row for row in q.report(quantized, prepared).rows if row.operator == "aten.matmul"]
    assert [row.how for row in rows] == ["float", "float"]  # one for both layers, one for the last
    assert all("rotation" in row.reason for row in rows)
    torch.testing.assert_close(
        fxkit.compile(quantized)(*data[0]), quantized(*data[0]), rtol=1e-3, atol=5e-2
    )


def test_odd_inputs_stay_and_graphs_are_taken() -> None:
    model = nn.Sequential(nn.Linear(15, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 15)
    gm: Any = q.rotate_inputs(fxkit.symbolic_trace(model))
    torch.testing.assert_close(gm(x), model(x))
    assert sum(name.startswith("rotation") for name, _ in gm.named_buffers()) == 1


@pytest.mark.parametrize("size", [0, 1, 12])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(UnsupportedError, match="power of two"):
        q.rotate_inputs(nn.Linear(4, 2).eval(), (torch.ones(1, 4),), size=size)
