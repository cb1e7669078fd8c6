"""Minification: what is left is small, still bad, and runs alone."""

from __future__ import annotations

import itertools
import math
import operator
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils._pytree import tree_leaves

import fxkit
from fxkit.analysis.reproducing.reduction import smallest_set
from fxkit.errors import NumericsError, UnsupportedError
from fxkit.ir.op import resolve
from fxkit.testing import minify
from tests.architectures import HUGGING_FACE
from tests.patterns.random_graphs import GRAPHS, SHAPE
from tests.sampling import examples


def has_nan(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
    return any(leaf.isnan().any() for leaf in tree_leaves(gm(*args)))


def operators(gm: fx.GraphModule) -> list[str]:
    calls = [resolve(node) for node in gm.graph.nodes]
    return [call.name for call in calls if call is not None]


def holds(*names: str) -> Callable[[fx.GraphModule, Any], bool]:
    """Make an oracle: the program runs and calls all of these operators."""

    def bad(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        gm(*args)
        found = operators(gm)
        return all(found.count(f"aten.{name}") >= names.count(name) for name in names)

    return bad


def chain(length: int, **planted: Any) -> fx.GraphModule:
    """Return a chain of pointwise calls, with other functions at some places."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    functions = (torch.relu, torch.tanh, torch.neg, torch.abs)
    for index in range(length):
        function = planted.get(f"at_{index}", functions[index % 4])
        value = graph.call_function(function, (value,))
    graph.output(value)
    return fx.GraphModule(nn.Module(), graph)


def test_one_node_of_a_thousand_takes_some_tens_of_calls() -> None:
    gm = chain(1000, at_377=torch.log, at_376=lambda x: x - 10.0)
    small = minify(gm, (torch.randn(4, 8, requires_grad=True),), has_nan)
    assert operators(small.graph_module) == ["aten.log"]
    assert small.nodes == 3
    assert small.nodes_before == 1002
    assert [tuple(value.shape) for value in small.args] == [(1, 1)]
    assert not small.args[0].requires_grad
    assert small.calls <= math.log2(1000) + 35
    assert small.raised == 0


def test_several_nodes_cost_as_many_binary_searches() -> None:
    places = dict.fromkeys(("at_100", "at_101", "at_500", "at_900"), torch.cos)
    calls = 0
    cosines = holds("cos", "cos", "cos", "cos")

    def bad(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        nonlocal calls
        calls += 1
        return cosines(gm, args)

    small = minify(chain(1000, **places), (torch.randn(3),), bad)
    assert operators(small.graph_module) == ["aten.cos"] * 4
    assert small.nodes <= 4 + 2
    assert small.calls == calls <= 4 * (math.log2(1000) + 2) + 40


@pytest.mark.parametrize("needed", [{0}, {99}, {3, 50, 51, 98}, set(), set(range(100))])
def test_smallest_set_finds_what_is_needed(needed: set[int]) -> None:
    calls = 0

    def is_bad(chosen: list[int]) -> bool:
        nonlocal calls
        calls += 1
        assert chosen == sorted(chosen)
        return needed <= set(chosen)

    assert smallest_set(list(range(100)), is_bad) == sorted(needed)
    assert calls <= (len(needed) or 1) * (math.log2(100) + 2) + 1


def test_smallest_set_of_what_is_not_monotone_is_bad() -> None:
    def is_bad(chosen: list[int]) -> bool:
        return len(chosen) % 2 == 0 and {3, 7} <= set(chosen)

    assert is_bad(smallest_set(list(range(20)), is_bad))


def test_neighbours_stay_neighbours_when_the_fault_needs_that() -> None:
    def log_of_cos(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        return any(
            node.target is torch.log and node.args[0].target is torch.cos
            for node in gm.graph.nodes
            if node.op == "call_function" and node.all_input_nodes
        )

    small = minify(chain(60, at_20=torch.cos, at_21=torch.log), (torch.ones(3),), log_of_cos)
    assert operators(small.graph_module) == ["aten.cos", "aten.log"]


def test_a_path_between_two_nodes_is_bypassed() -> None:
    def reaches(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        g = fxkit.graph(gm)
        return any(
            first in last.ancestors for first in g.find(torch.cos) for last in g.find(torch.log)
        )

    small = minify(chain(60, at_10=torch.cos, at_50=torch.log), (torch.ones(3),), reaches)
    assert operators(small.graph_module) == ["aten.cos", "aten.log"]


def test_results_that_are_not_needed_go_and_inputs_become_one() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "abcd"]
    sums = [graph.call_function(operator.add, pair) for pair in itertools.pairwise(inputs)]
    graph.output((*sums, graph.call_function(torch.cat, (inputs,))))
    gm = fx.GraphModule(nn.Module(), graph)
    args = tuple(torch.randn(2, 5) for _ in inputs)
    small = minify(gm, args, holds("cat"))
    assert small.nodes == 3
    (cat,) = small.graph_module.graph.find_nodes(op="call_function", target=torch.cat)
    assert len(cat.all_input_nodes) == 1
    assert small.graph_module(*small.args)[0].shape == (4, 1)


def test_weights_become_inputs_and_sizes_shrink_together() -> None:
    gm = fxkit.symbolic_trace(
        nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.Unflatten(1, (2, 12)), nn.ReLU())
    )
    small = minify(gm, (torch.randn(5, 12),), holds("layer_norm", "linear"))
    assert sorted(operators(small.graph_module)) == ["aten.layer_norm", "aten.linear"]
    shapes = {tuple(t.shape) for t in tree_leaves((small.args, small.graph_module.state_dict()))}
    assert max(max(shape) for shape in shapes if shape) == 1
    small.graph_module(*small.args)


def test_the_last_elements_are_kept_when_the_fault_is_there() -> None:
    x = torch.ones(2, 64)
    x[1, 63] = -1
    small = minify(chain(3, at_2=torch.log, at_0=torch.clone, at_1=torch.clone), (x,), has_nan)
    assert small.args[0].tolist() == [[-1.0]]


def test_an_exception_is_a_fault_when_the_oracle_catches_it() -> None:
    def raises(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        try:
            gm(*args)
        except RuntimeError as error:
            return "must match" in str(error)
        return False

    graph = fx.Graph()
    x = graph.placeholder("x")
    wide = graph.call_method("repeat", (graph.call_function(torch.relu, (x,)), 1, 2))
    bad = graph.call_function(operator.add, (wide, x))
    graph.output(graph.call_function(torch.sum, (graph.call_function(torch.tanh, (bad,)),)))
    small = minify(fx.GraphModule(nn.Module(), graph), (torch.randn(3, 5),), raises)
    assert operators(small.graph_module) == ["aten.add"]


def test_writes_stay_where_the_fault_needs_them() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        y.sub_(5.0)
        return torch.sqrt(torch.clone(y)) + 1

    small = minify(fxkit.symbolic_trace(program), (torch.rand(3),), has_nan)
    assert has_nan(small.graph_module, small.args)
    assert "aten.sqrt" in operators(small.graph_module)
    assert small.nodes <= 4


def test_the_whole_result_is_kept_for_an_oracle_that_takes_it_apart() -> None:
    def named(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        return bool(gm(*args)["loss"].isnan().any())

    def program(x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.tanh(x)
        return {"loss": torch.log(y - 3).mean(), "logits": torch.relu(y).exp()}

    small = minify(fxkit.symbolic_trace(program), (torch.randn(4, 4),), named)
    assert named(small.graph_module, small.args)
    assert operators(small.graph_module) == []  # the NaN itself is an input then
    assert small.nodes <= 3


def test_one_result_stays_one_tensor_for_an_oracle_that_wants_that() -> None:
    def single(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        return bool(gm(*args).isnan().any())

    small = minify(chain(100, at_30=lambda x: x - 9, at_31=torch.log), (torch.randn(4),), single)
    assert operators(small.graph_module) == ["aten.log"]


def test_keyword_inputs_and_defaults_are_bound() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y", default_value=-2.0)
    graph.output(graph.call_function(torch.log, (graph.call_function(operator.mul, (x, y)),)))
    gm = fx.GraphModule(nn.Module(), graph)
    small = minify(gm, (), has_nan, {"x": torch.ones(3)})
    assert operators(small.graph_module) == ["aten.log"]


def test_random_numbers_are_those_of_the_start() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.log(F.dropout(torch.relu(x) + 1, 0.5, True) - 0.5).tanh()

    state = torch.random.get_rng_state()
    small = minify(fxkit.symbolic_trace(program), (torch.ones(16),), has_nan)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert operators(small.graph_module)[-1] == "aten.log"


def test_nothing_of_the_caller_is_changed() -> None:
    def destructive(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        args[0].fill_(1)
        gm.double()
        for parameter in gm.parameters():
            parameter.data.zero_()
        return "aten.linear" in operators(gm)

    gm = fxkit.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    x, code = torch.zeros(2, 3), gm.code
    before = {key: value.clone() for key, value in gm.state_dict().items()}
    minify(gm, (x,), destructive)
    assert gm.code == code
    assert x.sum() == 0
    assert all(torch.equal(value, before[key]) for key, value in gm.state_dict().items())


def test_an_oracle_that_says_good_is_refused() -> None:
    with pytest.raises(NumericsError, match="to say bad of the whole program, got good"):
        minify(chain(3), (torch.ones(2),), has_nan)


def test_what_is_no_graph_module_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"expected a torch\.fx\.GraphModule, got builtin"):
        minify(torch.relu, (torch.ones(2),), has_nan)  # type: ignore[arg-type]


def test_an_oracle_that_raises_at_the_start_is_refused() -> None:
    def broken(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        raise KeyError("logits")

    with pytest.raises(NumericsError, match="got KeyError: 'logits'") as caught:
        minify(chain(3), (torch.ones(2),), broken)
    assert "let it catch" in str(caught.value)


def test_an_oracle_that_raises_later_counts_as_good() -> None:
    def fussy(gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        if len(gm.graph.nodes) < 8:
            raise ValueError("too small for me")
        return "aten.log" in operators(gm)

    small = minify(chain(40, at_17=torch.log), (torch.ones(2),), fussy)
    assert small.nodes == 8
    assert small.raised > 0


def test_the_script_asks_the_oracle_in_a_new_process(tmp_path: Path, python: list[str]) -> None:
    small = minify(chain(50, at_30=torch.log, at_29=torch.neg), (torch.ones(3),), has_nan)
    script = small.save(tmp_path / "found")
    done = subprocess.run([*python, "-I", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "the fault is there\n", "")
    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.raises(SystemExit, match="True"):
        exec(small.code, names)


def test_without_the_oracles_source_the_script_runs_the_program(tmp_path: Path) -> None:
    class Oracle:
        def __call__(self, gm: fx.GraphModule, args: tuple[Any, ...]) -> bool:
            return has_nan(gm, args)

    small = minify(chain(5, at_2=torch.log, at_1=torch.neg), (torch.ones(3),), Oracle())
    text = small.save(tmp_path).read_text()
    assert "the oracle is not here" in text
    assert "print(program(*args))" in text
    assert "print(program(*args))" in small.code


def test_a_real_model_is_reduced_to_a_node() -> None:
    torch.manual_seed(0)
    model, inputs = HUGGING_FACE["gpt2"]()
    gm = fxkit.capture(model, (), inputs(2)).graph_module
    tanh = fxkit.graph(gm).find(torch.tanh)[1].fx_node
    with fxkit.edit(gm) as e:
        log = e.call(torch.log, tanh, after=tanh)
        e.replace_uses(tanh, log)
    args = tuple(torch.randint(3, 99, (2, 7)) if "ids" in n.name else torch.ones(2, 7).long()
                 for n in gm.graph.find_nodes(op="placeholder"))  # fmt: skip
    small = minify(gm, args, has_nan)
    assert operators(small.graph_module) == ["aten.log"]
    assert small.args[0].numel() == 1
    assert small.calls <= 40


@examples(16, of=40, derandomize=True, database=None)
@given(gm=GRAPHS, choice=st.integers(0, 100))
def test_random_graphs_with_writes_and_views_are_reduced(gm: fx.GraphModule, choice: int) -> None:
    names = operators(gm)
    assume(names)
    wanted = names[choice % len(names)]

    def bad(other: fx.GraphModule, args: tuple[Any, ...]) -> bool:
        other(*args)
        return wanted in operators(other)

    args = (torch.randn(SHAPE), torch.randn(SHAPE))
    try:
        gm(*(value.clone() for value in args))
    except RuntimeError:
        reject()
    small = minify(gm, args, bad)
    assert bad(small.graph_module, small.args)
    assert operators(small.graph_module).count(wanted) == 1
    assert small.nodes <= 6
