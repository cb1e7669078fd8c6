"""What is unusual: nothing at all, everything at once: a picture or a clear error each."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.pipelines import SIMPLIFY
from fxkit.view import Report, diff, draw, profile, tree
from fxkit.view.differences.pass_timeline import timeline
from fxkit.view.profiling.peaks import Peaks
from tests.view import models


def test_an_empty_graph_is_measured_and_charted() -> None:
    found = profile(models.empty(), (), warmup=0, iters=1)
    assert found.rows == ()
    assert "0 nodes" in found.table()
    ET.fromstring(found.roofline(Peaks(1.0, 1.0, "given")))
    ET.fromstring(found.memory_timeline())
    assert found.to_rows() == []
    assert json.loads(found.to_json())["nodes"] == []


def test_an_empty_graph_has_no_history() -> None:
    gm = models.empty()
    gm.graph.output(())
    shown = timeline(PassManager(SIMPLIFY).run(gm))
    assert len(shown.steps) == 1
    assert "fx-viewer" in shown.html()
    assert "no difference" in diff(gm, gm).html()


@pytest.mark.parametrize("make", [models.hostile, models.stack, lambda: models.wide(10_000)])
def test_graphs_without_shapes_are_shown_in_every_way(make: Callable[[], fx.GraphModule]) -> None:
    gm = make()
    ET.fromstring(draw(gm).svg())
    assert draw(gm).html().startswith("<!DOCTYPE html>")
    assert str(tree(gm))
    changed = diff(gm, models.stack(1))
    assert changed.html().startswith("<!DOCTYPE html>")
    assert "flops" not in draw(gm).to_dict()["columns"] or make is models.hostile


class Varying(nn.Module):
    """Its sizes are expressions: one that the caller gives, and one that the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return torch.softmax(y, -1), y.nonzero() + 1


def varying() -> tuple[fx.GraphModule, tuple[torch.Tensor]]:
    args = (torch.randn(4, 16),)
    sizes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(Varying().eval(), args, dynamic_shapes=sizes)
    module = exported.module()
    assert isinstance(module, fx.GraphModule)
    return module, args


@pytest.mark.parametrize("color_by", ["family", "flops", "bytes"])
def test_sizes_that_are_expressions_are_shown_in_every_way(color_by: str) -> None:
    gm, _ = varying()
    ET.fromstring(draw(gm, color_by=color_by).svg())
    assert draw(gm, color_by=color_by).html().startswith("<!DOCTYPE html>")
    assert "linear" in str(tree(gm))
    assert "no difference" in diff(gm, gm).html()


def test_sizes_that_are_expressions_are_numbers_where_they_are_measured() -> None:
    gm, args = varying()
    rows = {row.name: row for row in profile(gm, args, warmup=0, iters=1).rows}
    assert rows["linear"].type == "f32[4,8]"
    assert rows["linear"].flops == 2 * 4 * 16 * 8
    assert rows["linear"].bytes == 4 * (4 * 16 + 16 * 8 + 8 + 4 * 8)
    assert rows["nonzero"].flops is None
    assert rows["add"].flops == 4 * 8 * 2


def test_calls_that_nobody_knows_are_measured() -> None:
    def secret(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    graph = fx.Graph()
    graph.output(graph.call_function(secret, (graph.placeholder("x"),)))
    found = profile(fx.GraphModule({}, graph), (torch.ones(4),), warmup=0, iters=2)
    (row,) = found.rows
    assert row.flops is None
    assert row.seconds is not None
    assert "1 node not counted" in found.table()


def test_a_path_that_can_not_be_written_is_a_clear_error(tmp_path: Path) -> None:
    gm = models.stack(1)
    missing = tmp_path / "missing"
    found = profile(gm, models.stack_args(), warmup=0, iters=1)
    writers = [
        lambda: Report("r").add_tree(gm).save(missing / "r.html"),
        lambda: diff(gm, gm).save(missing / "d.html"),
        lambda: found.export_chrome_trace(missing / "t.json"),
        lambda: found.memory_timeline().save(missing / "m.svg"),
    ]
    for write in writers:
        with pytest.raises(UnsupportedError, match="expected a path that can be written"):
            write()


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (lambda gm: fxkit.timeline(gm), "expected a PassResult, got ReLU"),
        (lambda gm: fxkit.draw(gm, profile=3), "expected profile to be a Profile, got int"),
        (lambda gm: fxkit.tree(gm, depth=-1), "expected depth to be None or a count of levels"),
    ],
)
def test_what_can_not_be_shown_is_told(look, message) -> None:
    with pytest.raises(UnsupportedError, match=message) as raised:
        look(fxkit.symbolic_trace(nn.ReLU()))
    assert raised.value.hint


def test_results_show_what_they_say_in_a_notebook() -> None:
    gm = fxkit.symbolic_trace(lambda x: (x * 1).relu().relu())
    result = fxkit.PassManager([fxkit.passes.Canonicalise()]).run(gm)
    assert repr(result) == result.table()
    rule = fxkit.rule(lambda x: torch.relu(x), lambda x: torch.tanh(x), name="to_tanh")
    explanation = fxkit.explain(gm, rule)
    assert repr(explanation) == str(explanation)
    report = fxkit.rewrite(gm, rule)
    assert repr(report) == report.table()
