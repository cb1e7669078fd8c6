"""Profiles: the same result as the module, honest sums, costs, memory by hand, all formats."""

from __future__ import annotations

import copy
import gc
import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxkit.analysis import cost
from fxkit.errors import UnsupportedError
from fxkit.view import Profile, profile
from fxkit.view.profiling import profiler
from fxkit.view.profiling.clocks import EventClock, HostClock, Reading
from fxkit.view.profiling.instrument import graph_inputs, instrument
from fxkit.view.profiling.peaks import Peaks, measure_peaks
from fxkit.view.texts.text_table import duration
from tests.view import models


class Program(nn.Module):
    """All kinds of nodes and arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Any]:
        y = self.parts(x) + self.shift
        a, b = y.split(2, -1)
        z = torch.clamp(a, max=float("inf")).add(b, alpha=scale)
        return {"z": z[:, 1:], "more": [y, x.shape[0], ("text", None, slice(1, 2))]}


def quick(gm: Any, args: tuple[Any, ...], **options: Any) -> Profile:
    with torch.no_grad():
        return profile(gm, args, warmup=0, iters=2, **options)


def test_timed_code_computes_what_the_module_does() -> None:
    gm = fx.symbolic_trace(Program())
    x = torch.randn(3, 4)
    result, stamps = instrument(gm).timed(*graph_inputs(gm, (x,), None))
    expected = gm(x)
    assert torch.equal(result["z"], expected["z"])
    assert torch.equal(result["more"][0], expected["more"][0])
    assert result["more"][1:] == expected["more"][1:]
    assert len(stamps) == len(gm.graph.nodes) + 1
    assert list(stamps) == sorted(stamps)


def test_code_and_graph_are_left_alone() -> None:
    gm = fx.symbolic_trace(Program())
    code, meta = gm.code, [dict(n.meta) for n in gm.graph.nodes]
    quick(gm, (torch.ones(3, 4),))
    assert gm.code == code
    assert [dict(n.meta) for n in gm.graph.nodes] == meta


def test_inputs_by_name_and_default() -> None:
    gm = fx.symbolic_trace(Program())
    x = torch.ones(3, 4)
    assert graph_inputs(gm, (), {"scale": 3.0, "x": x})[1] == 3.0
    assert graph_inputs(gm, (x,), None)[1] == 2.0
    with pytest.raises(UnsupportedError, match="expected 2 inputs, got 3"):
        graph_inputs(gm, (x, 1.0), {"other": 1})


def test_exported_graphs_take_nested_inputs() -> None:
    class Nested(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], *, bias: Tensor) -> Tensor:
            return pair[0] @ pair[1] + bias

    args, kwargs = ((torch.ones(2, 3), torch.ones(3, 2)),), {"bias": torch.ones(2)}
    gm = torch.export.export(Nested(), args, kwargs).module()
    assert isinstance(gm, fx.GraphModule)
    result = profile(gm, args, kwargs, warmup=0, iters=1)
    assert next(r for r in result.rows if "matmul" in r.operator).flops == 2 * 2 * 3 * 2


def test_rows_have_time_flops_and_bytes_by_hand() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(16, 32), nn.ReLU()))
    linear, relu = quick(gm, (torch.ones(8, 16),)).rows
    assert linear.type == "f32[8,32]"
    assert linear.seconds is not None
    assert linear.seconds > 0
    assert linear.flops == 2 * 8 * 16 * 32
    assert linear.bytes == 4 * (8 * 16 + 16 * 32 + 32 + 8 * 32)
    assert (relu.flops, relu.bytes) == (8 * 32, 4 * 2 * 8 * 32)


def test_types_come_from_the_run_where_the_graph_has_none() -> None:
    rows = quick(models.stack(2), models.stack_args()).rows
    assert {row.type for row in rows if row.operator == "aten.linear"} >= {"f32[2,3,8]"}


def test_live_memory_follows_storages() -> None:
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = torch.sin(x)  # 400 bytes, alive until b is made
            v = a.view(10, 10)  # a view: nothing new
            b = torch.cos(v)  # 400 more
            return b.sum()  # 4 bytes

    live = {
        r.name: r.live_bytes for r in quick(fx.symbolic_trace(Chain()), (torch.ones(100),)).rows
    }
    assert live == {"sin": 400, "view": 400, "cos": 800, "sum_1": 404}


def test_inputs_and_parameters_are_not_live_memory() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.view(2, 4), self.weight.view(2, 4)

    assert quick(fx.symbolic_trace(Views()), (torch.ones(8),)).peak_bytes == 0


def test_uncounted_nodes_are_listed_with_their_share() -> None:
    def mystery(x: Tensor) -> Tensor:
        return x * 2

    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(mystery, (x,))
    graph.output(graph.call_function(torch.sin, (y,)))
    result = quick(fx.GraphModule(nn.Module(), graph), (torch.ones(4),))
    assert [row.name for row in result.uncounted] == ["mystery"]
    text = result.table()
    assert "1 node not counted, " in text
    line = next(line for line in text.splitlines() if line.startswith("mystery"))
    assert "?" in line.split()


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


def test_unsteady_runs_are_owned_up_to() -> None:
    result = quick(models.stack(1), models.stack_args())
    assert "unsteady" in str(replace(result, quartiles=(1.0, 2.0)))
    assert "unsteady" not in str(replace(result, quartiles=(1.0, 1.1)))


def test_metrics_choose_what_is_measured() -> None:
    result = quick(models.stack(1), models.stack_args(), metrics=("flops",))
    assert result.end_to_end is None
    assert result.peak_bytes is None
    assert all(r.seconds is None and r.bytes is None for r in result.rows)
    assert any(r.flops for r in result.rows)
    assert "?" in result.table()


@pytest.mark.parametrize("options", [{"metrics": ("heat",)}, {"iters": 0}, {"warmup": -1}])
def test_bad_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="expected"):
        profile(models.stack(1), models.stack_args(), **options)


def test_what_holds_no_graph_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"expected a torch\.fx\.GraphModule"):
        profile(nn.ReLU(), (torch.ones(1),))


def test_a_program_that_holds_a_graph_is_called_itself() -> None:
    calls = []

    class Captured:
        graph_module = models.stack(1)

        def __call__(self, *args: Tensor) -> Tensor:
            calls.append(args)
            return self.graph_module(*args)

    assert quick(Captured(), models.stack_args()).title == "Captured"
    assert len(calls) == 2


def test_kernels_tell_which_nodes_they_compute() -> None:
    original = models.stack(1)

    def region_0(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x)

    graph = fx.Graph()
    graph.output(graph.call_function(region_0, (graph.placeholder("x"),)))
    compiled = SimpleNamespace(
        graph_module=original,
        lowered=fx.GraphModule(nn.Module(), graph),
        regions=[
            SimpleNamespace(name="region_0", nodes=("layers_0_norm", "gelu"), kernel="kernel_0")
        ],
    )
    from fxkit.analysis.tensor_types import propagate_types

    propagate_types(original, models.stack_args())
    row = profile(compiled, (torch.ones(3),), metrics=("flops",)).rows[0]
    assert row.computes == ("layers_0_norm", "gelu")
    assert row.module == "layers.0"
    assert row.family == "kernel"
    assert row.flops is not None
    assert row.flops > 96


def test_empty_graph() -> None:
    graph = fx.Graph()
    graph.output(None)
    result = quick(fx.GraphModule(nn.Module(), graph), ())
    assert result.rows == ()
    assert "0 nodes" in str(result)
    assert "<table" in result.html()


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


def test_the_nodes_add_up_to_the_run_that_was_timed() -> None:
    with torch.no_grad():
        found = profile(models.stack(3), models.stack_args(), warmup=1, iters=8)
    assert found.instrumented is not None
    quiet = [row for row in found.rows if row.seconds is None]
    assert not quiet
    assert 0.5 * found.instrumented < found.node_seconds <= found.instrumented * 1.001


class SlowClock:
    """Each reading takes 3 ns of the 10 ns that lie between two of them."""

    def __init__(self) -> None:
        self.now = 0

    def tick(self) -> int:
        self.now += 10
        return self.now

    def read(self, ticks: Any) -> Reading:
        return Reading(ticks, ticks)

    def wait(self) -> None:
        pass

    def cost(self) -> float:
        return 3.0


def test_what_the_clock_costs_is_taken_off_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "clock_for", lambda _: SlowClock())
    gm = models.stack(1)
    found = quick(gm, models.stack_args())
    assert {round((row.seconds or 0) * 1e9) for row in found.rows} == {7}
    assert found.clock_seconds == pytest.approx(3e-9 * len(gm.graph.nodes))
    assert Profile.from_dict(found.to_dict()).clock_seconds == found.clock_seconds


def test_a_reading_of_the_processors_clock_costs_what_lies_between_two() -> None:
    clock = HostClock()
    readings = iter(range(0, 10**6, 50))
    clock.tick = lambda: next(readings)
    assert clock.cost() == 50.0


def test_time_outside_of_nodes_is_told() -> None:
    found = quick(models.stack(1), models.stack_args())
    spent = found.node_seconds
    slow = replace(found, end_to_end=4 * spent, quartiles=(4 * spent, 4 * spent))
    assert slow.outside_seconds == pytest.approx(3 * spent)
    assert "outside of nodes " in slow.table()
    assert " (75.0 %)" in next(line for line in slow.summary() if "outside of nodes" in line)
    uneven = replace(found, end_to_end=1.2 * spent, quartiles=(1.1 * spent, 1.4 * spent))
    assert uneven.is_steady
    assert "outside of nodes" not in uneven.table()
    quick_call = replace(found, end_to_end=spent, quartiles=(spent, spent))
    assert "outside of nodes" not in quick_call.table()


def test_differences_within_the_noise_are_no_finding() -> None:
    found = quick(models.stack(1), models.stack_args())
    spent = found.node_seconds
    apart: dict[str, Any] = {
        "end_to_end": 1.2 * spent,
        "quartiles": (1.2 * spent, 1.2 * spent),
        "instrumented": 2.0,
    }
    sure = replace(found, **apart, noise=0.0)
    assert "outside of nodes" in sure.table()
    assert f"timers add {duration(2.0 - 1.2 * spent)}" in sure.table()
    unsure = replace(found, **apart, noise=3.0)
    assert "outside of nodes" not in unsure.table()
    assert f"timers add {duration(unsure.clock_seconds)}" in unsure.table()
    assert Profile.from_dict(unsure.to_dict()).noise == 3.0


def test_noise_is_the_spread_between_a_call_and_the_timed_run_beside_it() -> None:
    readings = [Reading([0, taken], [0, taken]) for taken in (100, 200, 300, 400)]
    steady = profiler._Runs(readings, [150e-9, 250e-9, 350e-9, 450e-9])
    assert steady.noise() == pytest.approx(0.0)
    shaken = profiler._Runs(readings, [100e-9, 210e-9, 330e-9, 500e-9])
    assert shaken.noise() == pytest.approx(20e-9)
    assert profiler._Runs([], []).noise() == 0.0


def test_no_garbage_is_collected_while_it_is_timed() -> None:
    states: list[bool] = []

    def look(x: Tensor) -> Tensor:
        states.append(gc.isenabled())
        return x

    graph = fx.Graph()
    graph.output(graph.call_function(look, (graph.placeholder("x"),)))
    quick(fx.GraphModule(nn.Module(), graph), (torch.ones(2),), metrics=("time",))
    assert states[-4:] == [False] * 4
    assert gc.isenabled()


def test_only_what_changed_is_measured_again() -> None:
    gm = models.stack(2)
    first = quick(gm, models.stack_args())
    again = quick(gm, models.stack_args(), baseline=first)
    assert all(row.is_reused for row in again.rows)
    assert again.end_to_end is not None
    assert [row.seconds for row in again.rows] == [row.seconds for row in first.rows]
    changed = copy.deepcopy(gm)
    node = next(n for n in changed.graph.nodes if n.name == "gelu_1")
    node.target = F.silu
    node.kwargs = {}
    changed.recompile()
    third = quick(changed, models.stack_args(), baseline=first)
    assert [row.name for row in third.rows if not row.is_reused] == ["gelu_1"]
    assert "1 node measured" in third.table()
    wider = quick(gm, (torch.arange(8).view(2, 4), torch.zeros(4, 4)), baseline=first)
    assert not [row.name for row in wider.rows if row.is_reused]


def test_timed_code_reads_the_clock_around_the_wanted_nodes_only() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid()))
    readings = iter(range(100))
    code = instrument(gm, clock=lambda: next(readings), only=[2])
    _, stamps = code.timed(torch.ones(2))
    assert stamps == (0, 1, 2, 3)
    assert code.spans == {2: (1, 2)}


def test_peak_memory_is_that_of_the_allocator() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = torch.sin(x)
            b = torch.softmax(a @ a.transpose(0, 1), -1)
            return (b @ a).sum()

    found = quick(fx.symbolic_trace(Wide()), (torch.randn(128, 64),))
    assert found.allocator_peak is not None
    assert found.peak_bytes is not None
    inside = found.peak_with_workspace
    assert inside is not None
    assert abs(inside - found.allocator_peak) <= 0.05 * found.allocator_peak
    assert abs(found.peak_bytes - found.allocator_peak) <= 0.05 * found.allocator_peak
    assert dict(found.peak_holders) == {"sin": 128 * 64 * 4, "matmul": 65536, "softmax": 65536}
    assert sum(size for _, size in found.peak_holders) == found.peak_bytes


def test_the_table_has_live_memory_and_what_operators_take_inside() -> None:
    class Convolves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x).relu()

    found = quick(fx.symbolic_trace(Convolves()), (torch.eye(64),))
    text = found.table(sort_by="memory")
    assert text.splitlines()[-4].split()[-2:] == ["live", "inside"]
    inverse, relu = text.splitlines()[-2:]
    assert inverse.split()[-2] == "16.4k"
    assert relu.split()[-2:] == ["32.8k", "0"]
    assert "inside of %linalg_inv" in text
    assert found.peak_with_workspace == found.allocator_peak
    assert "inside" not in found.table(group_by="op").splitlines()[-3]
    assert "inside" not in quick(models.stack(1), models.stack_args(), metrics=("flops",)).table()


def test_guards_are_counted_and_no_riddle() -> None:
    from fxkit.tracing import capture

    def program(x: Tensor) -> Tensor:
        return x + 1 if (x[0] > 0).all() else x - 1

    with torch.no_grad():
        captured = capture(program, (torch.ones(4, 2),))
    found = quick(captured.graph_module, (torch.ones(4, 2),))
    assert any(row.operator.startswith("guard.") for row in found.rows)
    assert found.uncounted == ()


def test_memory_inside_an_operator_is_told() -> None:
    class Sorts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x)

    (row,) = quick(fx.symbolic_trace(Sorts()), (torch.eye(64),)).rows
    assert row.workspace_bytes is not None
    assert row.workspace_bytes > 0


class Event:
    """Stands for an event of a device on which each piece of work takes a microsecond."""

    reached = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.reached += 1
        self.at = Event.reached

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e-3


def test_work_on_a_device_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    events = SimpleNamespace(Event=Event, synchronize=waits.append)
    device = torch.device("cpu")
    monkeypatch.setattr(profiler, "clock_for", lambda where: EventClock(where, events))
    found = quick(models.stack(1), models.stack_args(), device=device)
    assert {round((row.seconds or 0) * 1e9) for row in found.rows} == {1000}
    assert waits
    assert all(row.is_launch_bound for row in found.rows)
    assert "bound by their launch" in found.table()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_is_measured() -> None:
    gm = models.stack(2).cuda()
    found = quick(gm, tuple(arg.cuda() for arg in models.stack_args()))
    assert found.device.startswith("cuda")
    assert all(row.seconds is not None for row in found.rows)
    assert found.allocator_peak


def test_intensity_and_flat_rows() -> None:
    found = quick(fx.symbolic_trace(nn.Linear(16, 32)), (torch.ones(8, 16),))
    (row,) = found.to_rows()
    assert row["intensity"] == pytest.approx(8192 / (4 * (128 + 512 + 32 + 256)))
    assert row["share"] == 1.0


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


def test_a_device_is_measured() -> None:
    peaks = measure_peaks(size=64)
    assert peaks.flops_per_second > 1e6
    assert peaks.bytes_per_second > 1e6
    assert "measured" in peaks.how


def test_two_profiles_are_compared() -> None:
    before, after = (quick(models.stack(n), models.stack_args()) for n in (2, 1))
    found = before.compare(after)
    linear = next(line for line in found.lines if line.key == "aten.linear")
    assert (linear.nodes_before, linear.nodes_after) == (9, 5)
    assert found.whole["nodes"] == (28, 15)
    assert "nodes: 28 → 15 (-46.4 %)" in str(found)
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


def test_an_operator_may_bring_its_own_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_FORMULAS", {})

    class Sorts(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.sort(x)

    gm = fx.symbolic_trace(Sorts())
    (row,) = quick(gm, (torch.ones(1, 1, 4, 4),)).rows
    assert row.flops is None

    @cost.flop_formula(row.operator)
    def count(node: fx.Node, types: Any) -> int:
        return types["self"].numel

    (row,) = quick(gm, (torch.ones(1, 1, 4, 4),)).rows
    assert row.flops == 16


def test_flops_of_an_attention_block_are_those_of_the_formulas() -> None:
    rows = quick(models.stack(1), models.stack_args()).rows
    batch, length, width = 2, 3, 8
    tokens = batch * length
    by_name = {row.name: row.flops for row in rows}
    assert by_name["layers_0_query"] == 2 * tokens * width * width
    assert by_name["matmul"] == 2 * batch * length * length * width
    assert by_name["layers_0_down"] == 2 * tokens * 2 * width * width
    assert by_name["head"] == 2 * tokens * width * 32
