"""Scales are shared where values only move or join, and the report says with what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit import quantization as q
from fxkit.quantization.preparation import graph_module_of
from fxkit.quantization.sharing import makers, origins


class Joined(nn.Module):
    """Views, parts, a pool and a concatenation of what other layers take as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(8, 8) for _ in range(5))
        self.wide = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        left, right = torch.relu(self.a(x)), torch.sigmoid(self.b(x)) * 5
        halves = torch.cat([left, right], -1)
        part = halves.chunk(2, -1)[1]
        turned = left.reshape(-1, 8)
        pooled = nn.functional.max_pool1d(left, 3, 1, 1)
        return self.wide(halves), self.c(part), self.d(turned), self.e(pooled), self.e(left + 1)


def scales(program: Any) -> dict[str, tuple[float, int]]:
    """Return scale and zero point by the name of what is quantised."""
    nodes = graph_module_of(program).graph.nodes
    name = "quantized_decomposed.quantize_per_tensor"
    found = [node for node in nodes if name in str(node.target)]
    return {node.args[0].name: (node.args[1], node.args[2]) for node in found}


def config(**options: Any) -> q.QuantizationConfig:
    return q.QuantizationConfig(q.int8_static(), shares_scales=True, **options)


def batches(count: int = 4) -> list[tuple[Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(2, 5, 8) * (1 + index),) for index in range(count)]


def calibrated(settings: Any, data: list[Any]) -> q.PreparedProgram:
    torch.manual_seed(1)
    prepared = q.prepare(Joined().eval(), data[0], settings)
    q.calibrate(prepared, data, progress=False)
    return prepared


def test_what_moves_or_is_joined_shares_a_scale() -> None:
    data = batches()
    prepared = calibrated(config(), data)
    quantized: Any = q.convert(prepared)
    found = scales(quantized)
    own = {name for name in found if name.startswith("add") or name == "x"}
    shared = {found[name] for name in found if name not in own}
    assert len(found) == 6 and len(own) == 2 and len(shared) == 1
    assert not shared & {found[name] for name in own}
    apart = scales(q.convert(calibrated(q.int8_static(), data)))
    assert apart.keys() == found.keys()
    assert len({apart[name] for name in apart if name not in own}) > 1
    torch.testing.assert_close(prepared(*data[0]), prepared.remake()(*data[0]), rtol=0, atol=0)
    torch.testing.assert_close(
        fxkit.compile(quantized)(*data[1]), quantized(*data[1]), rtol=1e-4, atol=1e-1
    )


def test_two_halves_merged_are_the_whole() -> None:
    data = batches(6)
    whole, first, second = (calibrated(config(), part) for part in (data, data[:3], data[3:]))
    first.merge(second)
    assert scales(q.convert(first)) == scales(q.convert(whole))
    counts = {name: observer.count for name, observer in whole.observers.items()}
    assert {name: observer.count for name, observer in first.observers.items()} == counts


def test_the_report_says_with_what_and_where_it_stops() -> None:
    data = batches()
    prepared = calibrated(config(), data)
    rows = q.report(q.convert(prepared), prepared).rows
    notes = [note for row in rows for note in row.notes]
    joined = [note for note in notes if note.startswith("%cat shares its scale with")]
    assert len(joined) == 1
    assert "%relu" in joined[0] and "%mul" in joined[0] and "compute" in joined[0]
    assert not any(note.startswith(("%add", "%x shares")) for note in notes)


def test_specs_that_differ_share_nothing() -> None:
    data = batches()
    other = config(by_module={"wide": q.int8_static(scheme="symmetric")})
    prepared = calibrated(other, data)
    observers = prepared.observers
    assert all(observers["cat"] is not one for name, one in observers.items() if name != "cat")


@pytest.mark.parametrize("traced", [False, True])
def test_groups_of_a_graph(traced: bool) -> None:
    model, x = Joined().eval(), torch.randn(2, 5, 8)
    program: Any = fxkit.symbolic_trace(model) if traced else fxkit.capture(model, (x,))
    gm = graph_module_of(program)
    found, nodes = origins(gm), {node.name: node for node in gm.graph.nodes}
    cat = next(name for name in nodes if name.startswith("cat"))
    group = {name for name in found if found[name] == found[cat]}
    assert {"relu", "mul", "getitem", "reshape"} <= group
    assert "sigmoid" not in group and "add" not in group
    assert [node.name for node in makers(nodes[cat])] == ["relu", "mul"]
