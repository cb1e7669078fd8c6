"""Each public function takes a program of any kind, or says what to give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxkit
from fxkit.errors import FxkitError, UnsupportedError

ARGS = (torch.randn(2, 4),)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * 1


def function(x: Tensor) -> Tensor:
    return torch.relu(x + 1) * 1


def called(program: Any) -> Any:
    program(*ARGS)
    return program


LAYER = Layer().eval()
# What each is called here, and how one is made.
KINDS: dict[str, Callable[[], Any]] = {
    "module": lambda: LAYER,
    "function": lambda: function,
    "graph_module": lambda: fxkit.symbolic_trace(LAYER),
    "captured": lambda: fxkit.capture(LAYER, ARGS),
    "captured_function": lambda: fxkit.capture(function, ARGS),
    "captured_aten": lambda: fxkit.capture(LAYER, ARGS, mode="aten"),
    "captured_export": lambda: fxkit.capture(LAYER, ARGS, mode="export"),
    "captured_partial": lambda: fxkit.capture(LAYER, ARGS, mode="partial"),
    "exported": lambda: torch.export.export(LAYER, ARGS),
    "compiled": lambda: called(fxkit.compile(LAYER)),
    "compiled_function": lambda: called(fxkit.compile(function)),
    "compiled_uncalled": lambda: fxkit.compile(function),
    "compiled_module": lambda: fxkit.lower.to_cpp(fxkit.symbolic_trace(LAYER), ARGS),
    "objects": lambda: fxkit.graph(fxkit.symbolic_trace(LAYER)),
    "fx_graph": lambda: fxkit.symbolic_trace(LAYER).graph,
    "nothing": lambda: None,
    "number": lambda: 3,
}
GRAPHS = {"graph_module", "captured", "captured_function", "captured_aten"}
GRAPHS |= {"captured_export", "compiled", "compiled_function"}
RUN = {*GRAPHS, "module", "function", "exported", "compiled_module"}
NO_PROGRAM = {"objects", "fx_graph", "nothing", "number"}
SHOWN = {*GRAPHS, "exported", "captured_partial", "compiled_module", "objects"}


@fxkit.rule
def multiply_by_one(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1, x


def edited(program: Any) -> int:
    with fxkit.edit(program) as e:
        return len(e.journal)


PASSES = (fxkit.passes.Canonicalise(),)
# How each is called with a program, and the kinds that it takes.
CALLS: dict[str, tuple[Callable[[Any, Path], Any], set[str]]] = {
    "capture": (lambda p, _: fxkit.capture(p, ARGS), {*KINDS} - NO_PROGRAM),
    "compile": (lambda p, _: fxkit.compile(p)(*ARGS), {*KINDS} - NO_PROGRAM),
    "graph": (lambda p, _: fxkit.graph(p).find(torch.relu), GRAPHS),
    "find": (lambda p, _: fxkit.find(p, lambda x: torch.relu(x)), GRAPHS),
    "explain": (lambda p, _: fxkit.explain(p, multiply_by_one), GRAPHS),
    "rewrite": (lambda p, _: fxkit.rewrite(p, multiply_by_one), GRAPHS),
    "edit": (lambda p, _: edited(p), GRAPHS),
    "verify": (lambda p, _: fxkit.verify(p), GRAPHS),
    "fill_fake_values": (lambda p, _: fxkit.fill_fake_values(p), GRAPHS),
    "passes": (
        lambda p, _: fxkit.PassManager(PASSES, args=ARGS).run(p),
        {*GRAPHS, "exported"},
    ),
    "tree": (lambda p, _: fxkit.tree(p), SHOWN),
    "tree_of_a_call": (lambda p, _: fxkit.tree(p, ARGS), {*SHOWN, "module", "function"}),
    "draw": (lambda p, _: fxkit.draw(p), SHOWN),
    "draw_of_a_call": (lambda p, _: fxkit.draw(p, ARGS), {*SHOWN, "module", "function"}),
    "diff": (lambda p, _: fxkit.diff(p, p), SHOWN),
    "profile": (lambda p, _: fxkit.profile(p, ARGS, warmup=0, iters=1), {*RUN, "objects"}),
    "report": (
        lambda p, path: fxkit.report(p, path, ARGS, iters=1),
        {*RUN, "compiled_uncalled"},
    ),
    "assert_equivalent": (
        lambda p, _: fxkit.testing.assert_equivalent(p, p, ARGS),
        {*KINDS} - NO_PROGRAM - {"exported"},
    ),
}


# A report compiles and measures: here of one program of each way that leads to a graph.
REPORTED = {"module", "captured_aten", "exported", "compiled_uncalled", *NO_PROGRAM}
CASES = [
    pytest.param(call, kind, marks=() if (row + column) % 3 == 0 else (pytest.mark.sweep,))
    for row, call in enumerate(CALLS)
    for column, kind in enumerate(KINDS)
    if call != "report" or kind in REPORTED
]


@pytest.mark.parametrize(("call", "kind"), CASES)
def test_a_program_of_any_kind_is_taken_or_refused(call: str, kind: str, tmp_path: Path) -> None:
    run, taken = CALLS[call]
    with torch.no_grad():
        program = KINDS[kind]()
        if kind in taken:
            run(program, tmp_path / "page.html")
            return
        with pytest.raises(FxkitError, match="expected ") as caught:
            run(program, tmp_path / "page.html")
    assert caught.value.hint


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: dict[str, Tensor], *, scale: float = 1.0) -> dict[str, Any]:
        return {"y": [self.linear(inputs["x"]) * scale + inputs["z"]]}


NESTED_ARGS = ({"x": ARGS[0], "z": torch.randn(2, 4)},)
SCALE = {"scale": 2.0}
NESTED: dict[str, Callable[[Any], Any]] = {
    "module": lambda model: model,
    "captured": lambda model: fxkit.capture(model, NESTED_ARGS, SCALE),
    "captured_aten": lambda model: fxkit.capture(model, NESTED_ARGS, SCALE, mode="aten"),
    "exported": lambda model: torch.export.export(model, NESTED_ARGS, SCALE),
}


@pytest.mark.parametrize("kind", NESTED)
def test_inputs_are_those_of_the_program(kind: str, tmp_path: Path) -> None:
    program = NESTED[kind](Nested())
    with torch.no_grad():
        found = fxkit.profile(program, NESTED_ARGS, SCALE, warmup=0, iters=1)
        assert {row.operator for row in found.rows} >= {"aten.mul", "aten.add"}
        if kind == "exported":
            page = fxkit.report(program, tmp_path / "page.html", NESTED_ARGS, SCALE, iters=1)
            assert "aten.mul" in page.read_text()


@pytest.mark.parametrize("kind", ["module", "function", "graph_module", "captured", "exported"])
@pytest.mark.parametrize("call", ["tree", "draw", "profile", "report", "capture"])
def test_a_tensor_in_place_of_a_tuple_is_refused(call: str, kind: str, tmp_path: Path) -> None:
    first = (tmp_path / "page.html",) if call == "report" else ()
    with pytest.raises(UnsupportedError, match="tuple") as caught:
        getattr(fxkit, call)(KINDS[kind](), *first, ARGS[0])
    assert caught.value.hint and "(x,)" in caught.value.hint
