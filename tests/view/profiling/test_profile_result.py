"""What a profile shows: honest sums, tables, charts, comparisons, all formats."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.view.drawings.graph_data import column
from fxkit.view.profiling.peaks import Peaks
from fxkit.view.profiling.profile_result import Profile
from tests.sampling import one_in
from tests.view import models
from tests.view.models import quick


def test_sums_and_groups_add_up() -> None:
    result = quick(models.stack(3), models.stack_args())
    for grouping in ("node", "module", "op"):
        entries = result.entries(group_by=grouping)
        assert sum(e.seconds or 0.0 for e in entries) == pytest.approx(result.node_seconds)
        assert sum(e.nodes for e in entries) == len(result.rows)
    modules = {e.key: e.nodes for e in result.entries(group_by="module")}
    assert modules["layers.*.up"] == 3
    overhead = (result.instrumented or 0) - (result.end_to_end or 0)
    assert result.overhead == pytest.approx(overhead)


@pytest.mark.parametrize(("whole", "layers"), one_in(3, [0.9, 1.0, 4.0], [1, 3, 12]))
def test_rows_add_up_to_a_call_in_text_and_html(whole: float, layers: int) -> None:
    measured = quick(models.stack(layers), models.stack_args())
    found = replace(measured, end_to_end=whole * measured.node_seconds)
    tables = re.findall(r"<table.*?</table>", found.html_fragment(), re.DOTALL)
    assert len(tables) == 3
    for text in tables:
        rows = re.findall(r"<tr.*?</tr>", text.partition("</thead>")[2], re.DOTALL)
        times = [float(re.findall(r'class="fx-num" data-v="([^"]*)"', row)[0]) for row in rows]
        assert sum(times) == pytest.approx(found.end_to_end)
    for group_by in ("node", "op", "module"):
        _, _, text = found.table(group_by=group_by, limit=3).partition("\n\n")
        shares = re.findall(r"(-?[\d.]+)\s%", text.replace("−", "-"))
        assert sum(map(float, shares)) == pytest.approx(100.0, abs=0.5)


def test_slowest_nodes_come_first() -> None:
    html = quick(models.stack(1), models.stack_args()).html_fragment()
    titles = re.findall(r"<h3>(.*?)</h3>", html)
    assert titles == ["slowest nodes", "by operator", "by module"]


def test_nodes_are_counted_as_in_other_views() -> None:
    gm = fxkit.capture(models.Stack(3), models.stack_args()).graph_module
    count = len(gm.graph.nodes)
    found = quick(gm, models.stack_args())
    calls = sum(node.op.startswith("call_") for node in gm.graph.nodes)
    assert len(found.rows) == calls < count
    assert found.summary()[0].startswith(f"GraphModule: {count} nodes, of which {calls} compute")
    assert fxkit.tree(gm).root.nodes == count
    assert str(fxkit.draw(gm)).startswith(f"graph: {count} nodes, ")
    assert fxkit.draw(gm).to_dict()["nodes"] == count
    assert f">{count} nodes</span>" in fxkit.draw(gm).html_fragment()
    assert fxkit.diff(gm, gm).summary().startswith(f"{count} nodes before, {count} after")
    assert Profile.from_dict(found.to_dict()).node_count == count
    below = [child.nodes for child in fxkit.tree(gm, fold=False).root.children]
    assert sum(below) == count
    assert sum(column(fxkit.draw(gm).to_dict(), "nodes")) == count


def test_sorting() -> None:
    result = quick(models.stack(1), models.stack_args())
    flops = [e.flops or 0 for e in result.entries(sort_by="flops")]
    assert flops == sorted(flops, reverse=True)
    assert [e.key for e in result.entries(sort_by="order")] == [r.name for r in result.rows]
    with pytest.raises(UnsupportedError, match="expected sort_by"):
        result.entries(sort_by="colour")


def test_table_says_the_whole_and_what_is_left_out() -> None:
    result = quick(models.stack(2), models.stack_args())
    text = result.table(limit=3)
    assert "end-to-end " in text
    assert "sum of nodes " in text
    assert "timers add " in text
    assert f"… {len(result.rows) - 3} more, " in text


def test_json_and_html() -> None:
    result = quick(models.stack(1), models.stack_args())
    values = json.loads(result.to_json())
    assert values["version"] == 2
    assert len(values["nodes"]) == len(result.rows)
    assert values["sum_of_nodes"] == pytest.approx(result.node_seconds)
    assert "layers_0_up" in result.html()


def test_chrome_trace_nests_modules_over_nodes(tmp_path: Path) -> None:
    result = quick(models.stack(2), models.stack_args())
    events = json.loads(result.export_chrome_trace(tmp_path / "t.json").read_text())["traceEvents"]
    nodes = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    spans = {e["name"]: e for e in events if e["ph"] == "X" and e["tid"] == 1}
    assert [e["name"] for e in nodes] == [r.name for r in result.rows]
    layer = spans["layers.1"]
    inside = [e for e in nodes if "layers_1" in e["name"]]
    assert all(
        layer["ts"] - 1e-6 <= e["ts"] and e["ts"] + e["dur"] <= layer["ts"] + layer["dur"] + 1e-6
        for e in inside
    )
    assert any(e["ph"] == "C" for e in events)


def test_intensity_and_flat_rows() -> None:
    found = quick(fx.symbolic_trace(nn.Linear(16, 32)), (torch.ones(8, 16),))
    (row,) = found.to_rows()
    assert row["intensity"] == pytest.approx(8192 / (4 * (128 + 512 + 32 + 256)))
    assert row["share"] == pytest.approx(row["seconds"] / found.end_to_end)


def test_pandas_is_given_the_rows_or_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = quick(models.stack(1), models.stack_args())
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert found.to_pandas() == found.to_rows()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnsupportedError, match="pip install pandas"):
        found.to_pandas()


def test_charts_show_each_node(tmp_path: Path) -> None:
    found = quick(models.stack(1), models.stack_args())
    roofs = Peaks(1e11, 1e10, "given")
    chart = found.roofline(roofs)
    root = ET.fromstring(chart)
    titles = {"".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}title")}
    assert any(title.startswith("gelu\n") for title in titles)
    assert "100 GFLOP/s" in chart
    live = found.memory_timeline()
    shown = list(ET.fromstring(live).iter("{http://www.w3.org/2000/svg}title"))
    assert len(shown) == len(found.rows)
    assert live.save(tmp_path / "live.svg").read_text() == live
    assert set(chart._repr_mimebundle_()) == {"image/svg+xml", "text/plain"}


def test_two_profiles_are_compared() -> None:
    before, after = (quick(models.stack(n), models.stack_args()) for n in (2, 1))
    found = before.compare(after)
    linear = next(line for line in found.lines if line.key == "aten.linear")
    assert (linear.nodes_before, linear.nodes_after) == (9, 5)
    assert found.whole["nodes"] == (31, 18)
    assert "nodes: 31 → 18 (-41.9 %)" in str(found)
    assert json.dumps(found.to_dict())
    with pytest.raises(UnsupportedError, match="expected group_by out of"):
        before.compare(after, group_by="colour")


def test_kernels_are_grouped_by_region() -> None:
    found = quick(models.stack(1), models.stack_args())
    kernel = replace(found.rows[0], name="region_0", computes=("add", "gelu"))
    some = replace(found, rows=(kernel, *found.rows[1:]))
    operators = {entry.key for entry in some.entries(group_by="op")}
    assert "kernel: add + gelu" in {
        e.key
        for e in replace(
            some, rows=(replace(kernel, family="kernel", computes=("add_2", "gelu", "add_1")),)
        ).entries(group_by="op")
    }
    assert "kernel: add + gelu" not in operators
    keys = {entry.key: entry.nodes for entry in some.entries(group_by="region")}
    assert keys == {"region_0": 1, "in no region": len(found.rows) - 1}
