"""Profiles: the same result as the module, costs and memory by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxkit
from fxkit.analysis import cost
from fxkit.errors import InvalidGraphError, UnsupportedError
from fxkit.view import profile
from fxkit.view.profiling.instrument import graph_inputs, instrument
from fxkit.view.profiling.peaks import measure_peaks
from tests.view import models
from tests.view.models import quick


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
        profile(object(), (torch.ones(1),))


def test_a_program_that_holds_a_graph_is_called_itself() -> None:
    calls = []

    class Captured:
        graph_module = models.stack(1)

        def __call__(self, *args: Tensor) -> Tensor:
            calls.append(args)
            return self.graph_module(*args)

    measured = quick(Captured(), models.stack_args())
    assert measured.title == "Captured"
    assert len(calls) == measured.iters


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
    assert "1 node, of which 0 compute" in str(result)
    assert "<table" in result.html()


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
    assert text.splitlines()[-5].split()[-2:] == ["live", "inside"]
    inverse, relu = text.splitlines()[-3:-1]
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


def test_a_device_is_measured() -> None:
    peaks = measure_peaks(size=64)
    assert peaks.flops_per_second > 1e6
    assert peaks.bytes_per_second > 1e6
    assert "measured" in peaks.how


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


@pytest.mark.parametrize("args", [(torch.ones(3, 5),), (torch.ones(3, 4, dtype=torch.float64),)])
def test_inputs_that_do_not_fit_are_told_with_node_line_and_shapes(args: tuple[Tensor]) -> None:
    gm = fxkit.symbolic_trace(Program())
    with pytest.raises(
        InvalidGraphError, match="expected operands that parts_0 can take"
    ) as caught:
        profile(gm, args)
    assert "%x: f" in str(caught.value) and f"[3,{args[0].shape[1]}]" in str(caught.value)
    assert "test_profiler.py" in (caught.value.source or "")
    assert "parts_0" in (caught.value.node or "")
