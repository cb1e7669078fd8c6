"""Probes: they look at the right value, name node and line, change nothing, and go again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fxkit
from fxkit.analysis.editing import edit
from fxkit.errors import NumericsError
from fxkit.passes import (
    CheckNumbers,
    CommonSubexpressionElimination,
    DeadCodeElimination,
    ObserveValues,
    PrintValues,
    RemoveProbes,
    TimeNodes,
)
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.print_values import describe
from fxkit.passes.time_nodes import Timings

X = torch.tensor([[1.0, -1.0], [4.0, 0.0]])


def f(x):
    y = x * 2
    z = torch.log(y)
    y.add_(1)
    return torch.relu(z), y, torch.sort(x)


def probed(function, *passes, args=(X,)):
    gm = fxkit.symbolic_trace(function)
    PassManager(passes, args=args).run(gm)
    return gm


def test_the_first_node_that_makes_nan_is_named_with_its_line():
    gm = probed(f, CheckNumbers())
    with pytest.raises(NumericsError) as caught:
        gm(X)
    error = caught.value
    assert error.message == "expected numbers from %log, got 1 NaN among the 4 of f32[2,2]"
    assert error.node == "%log: f32[2,2] = aten.log(%mul)"
    assert error.source.startswith("test_probes.py:") and error.source.endswith("in f")
    assert gm(X.abs())[0].shape == (2, 2)


def test_infinities_are_faults_on_request():
    gm = probed(f, CheckNumbers(infinite=True))
    with pytest.raises(NumericsError, match="from %log, got 1 infinite"):
        gm(X.abs())


def test_nodes_are_chosen_as_in_find():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    for chosen, names in (
        ({"operator": nn.Linear}, ["_0", "_1_1"]),
        ({"module": "1.*"}, ["_1_0", "_1_1"]),
        ({"where": lambda node: node.dtype == torch.float64}, []),
        ({"source": "nowhere.py"}, []),
    ):
        seen = []
        gm = probed(
            model, ObserveValues(callback=lambda v, place, s=seen: s.append(place), **chosen)
        )
        gm(X)
        assert [place.name for place in seen] == names


def test_a_callback_sees_the_value_as_it_is_right_after_the_node():
    copies = {}
    gm = probed(
        f,
        ObserveValues(
            callback=lambda v, place: copies.update(
                {place.name: v.clone() if isinstance(v, torch.Tensor) else v}
            )
        ),
    )
    gm(X)
    assert torch.equal(copies["mul"], X * 2)
    assert torch.equal(copies["add_"], X * 2 + 1)
    assert torch.equal(copies["sort"].values, X.sort().values)
    assert torch.equal(copies["x"], X)


def test_printing_tells_type_range_node_and_line():
    lines = []
    gm = probed(f, PrintValues(operator=torch.log, write=lines.append))
    gm(X)
    (line,) = lines
    assert line.startswith("%log: f32[2,2] = aten.log(%mul)    # test_probes.py:")
    assert line.endswith("f32[2,2], 0.6931 to 2.079, mean 1.386, 1 NaN, 1 infinite")


def test_printing_goes_to_the_error_stream_by_default(capsys):
    probed(lambda x: x.exp(), PrintValues(operator=torch.exp))(X)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("%exp: f32[2,2] = aten.exp(%x)")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.zeros(0), "f32[0]"),
        (torch.tensor([True, False]), "b1[2], 0 to 1, mean 0.5"),
        (torch.tensor(torch.nan), "f32[], 1 NaN"),
        (torch.ones(1, dtype=torch.complex64), "c64[1]"),
        (3, "3"),
    ],
)
def test_any_value_can_be_described(value, told):
    assert describe(value) == told


def test_times_are_kept_for_each_node_and_call():
    timings = Timings()
    gm = probed(f, TimeNodes(timings=timings))
    gm(X)
    gm(X)
    names = [place.name for place in timings.seconds]
    assert names == ["mul", "log", "add_", "relu", "sort"]
    assert all(len(times) == 2 and min(times) > 0 for times in timings.seconds.values())
    assert "aten.relu(%log)    # test_probes.py:" in timings.table()


@pytest.mark.parametrize("kind", [CheckNumbers, PrintValues, ObserveValues, TimeNodes])
def test_all_is_as_before_once_probes_are_removed(kind):
    options = {"callback": print} if kind is ObserveValues else {}
    gm = fxkit.symbolic_trace(f)
    code, children = gm.code, list(gm.children())
    PassManager([kind(**options)], args=(X,)).run(gm)
    assert gm.code != code
    PassManager([RemoveProbes()], args=(X,)).run(gm)
    assert (gm.code, list(gm.children())) == (code, children)


def test_removing_can_be_undone():
    gm = probed(f, CheckNumbers(operator=torch.log))
    with pytest.raises(RuntimeError, match="stop"), edit(gm) as e:
        RemoveProbes().apply(e, None)
        assert not list(gm.children())
        raise RuntimeError("stop")
    with pytest.raises(NumericsError):
        gm(X)


def test_probes_survive_our_passes_and_those_of_torch():
    seen = []
    gm = probed(
        lambda x: x.exp() + x.exp(),
        ObserveValues(operator=torch.exp, callback=lambda v, place: seen.append(place.name)),
        DeadCodeElimination(),
        CommonSubexpressionElimination(),
    )
    gm.graph.eliminate_dead_code()
    gm.recompile()
    gm(X)
    assert seen == ["exp", "exp_1"]


def test_nothing_happens_on_fake_tensors_and_copies_look_too():
    seen = []
    gm = probed(f, ObserveValues(callback=lambda v, place: seen.append(place.name)))
    assert seen == [], "types were worked out without looking"
    fxkit.propagate_types(gm, (X,))
    assert seen == []
    copy.deepcopy(gm)(X)
    assert seen[0] == "x"


def test_a_captured_program_is_seen_from_the_first_call_of_each_kind():
    seen = []
    captured = fxkit.capture(f, (X,))
    observe = ObserveValues(operator="aten.log", callback=lambda value, place: seen.append(value))
    PassManager([observe]).run(captured)
    captured(X)
    with torch.no_grad():
        captured(X)
    captured(torch.cat([X, X]))
    captured(X.double())
    assert [tuple(value.shape) for value in seen] == [(2, 2), (2, 2), (4, 2), (2, 2)]
