"""Graphs for certain sizes, made of one whose sizes are free."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxkit
from fxkit.compiling import graph_compiler
from fxkit.ir.types import set_type, type_of
from fxkit.lower.compiling import specialising
from fxkit.lower.compiling.specialising import Specialiser
from fxkit.passes.dead_code_elimination import DeadCodeElimination
from fxkit.passes.manager.functions import as_pass
from tests.lower.compiling.sized_programs import PROGRAMS, SIZES
from tests.lower.programs_by_sizes import random_program
from tests.sampling import one_in

LAYER = nn.MultiheadAttention(8, 2).eval()


def attention(x: Tensor) -> Tensor:
    return LAYER(x, x, x)[0]


@pytest.fixture
def propagated(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Return the graphs whose types are propagated from now on."""
    graphs: list[fx.GraphModule] = []
    real = specialising.propagate_types

    def propagate(gm: fx.GraphModule, args: Any) -> Any:
        graphs.append(gm)
        return real(gm, args)

    monkeypatch.setattr(specialising, "propagate_types", propagate)
    return graphs


def captured(fn: Any, args: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    with torch.no_grad():
        return fxkit.capture(fn, args, dynamic=True).graph_module


def said(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return all that a graph says, types with their strides."""
    nodes = list(gm.graph.nodes)
    return [
        (n.op, str(n.target), fx.map_arg((n.args, n.kwargs), nodes.index), type_of(n))
        for n in nodes
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_types_follow_from_expressions(name: str, propagated: list[fx.GraphModule]) -> None:
    make, inputs = PROGRAMS[name]
    gm = captured(make(), inputs(3, 7))
    often = Specialiser(gm)
    with torch.no_grad():
        for sizes in SIZES:
            args = inputs(*sizes)
            found = often.at(args)
            torch.testing.assert_close(found(*args), gm(*args))
            assert said(found) == said(Specialiser(gm).at(args))
    assert len(propagated) == 1 + len(SIZES)  # the first one is compared


@pytest.mark.parametrize("seed", one_in(8, range(40)))
def test_types_of_random_programs(seed: int) -> None:
    program = random_program(Random(seed))
    gm = captured(program, program.inputs(5, 23))
    often = Specialiser(gm)
    with torch.no_grad():
        for sizes in ((5, 23), (7, 31), (47, 13), (2, 3), (3, 2)):
            args = program.inputs(*sizes)
            try:
                gm(*args)
            except (RuntimeError, IndexError):
                continue
            assert said(often.at(args)) == said(Specialiser(gm).at(args))


def test_a_size_of_one_inside_is_propagated(propagated: list[fx.GraphModule]) -> None:
    gm = captured(lambda x: x[1:].t().contiguous() * 2, (torch.randn(4, 5),))
    often = Specialiser(gm)
    for length in (4, 3, 2):
        often.at((torch.randn(length, 5),))
    assert len(propagated) == 2


def test_other_strides_are_propagated(propagated: list[fx.GraphModule]) -> None:
    gm = captured(lambda x: torch.relu(x) * 2, (torch.randn(4, 5),))
    often = Specialiser(gm)
    often.at((torch.randn(4, 5),))
    found = often.at((torch.randn(6, 7).t(),))
    assert len(propagated) == 2
    assert [type_of(n).stride for n in found.graph.nodes if n.op == "placeholder"] == [(1, 7)]


def test_strides_that_lead_to_no_element_may_differ(propagated: list[fx.GraphModule]) -> None:
    """What attention returns for one token is flattened in one way or in another."""

    def step(query: Tensor, keys: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, keys, keys).transpose(1, 2).flatten(2) + 1

    args = [(torch.randn(1, 4, 1, 16), torch.randn(1, 4, tokens, 16)) for tokens in (5, 9, 17)]
    with torch.no_grad():
        gm = fxkit.capture(step, args[0], dynamic={"keys": 2}).graph_module
        often = Specialiser(gm)
        for one in args:
            torch.testing.assert_close(often.at(one)(*one), step(*one))
    assert len(propagated) == 1


def test_what_the_data_decide_is_propagated(propagated: list[fx.GraphModule]) -> None:
    gm = captured(lambda x: x.nonzero().float() + 1, (torch.ones(4, 5),))
    often = Specialiser(gm)
    for length in (4, 3):
        often.at((torch.ones(length, 5),))
    assert len(propagated) == 2


def test_expressions_that_are_not_right_are_not_used(propagated: list[fx.GraphModule]) -> None:
    gm = captured(lambda x: torch.relu(x) * 2, (torch.randn(4, 5),))
    relu = next(node for node in gm.graph.nodes if node.op == "call_function")
    set_type(relu, dataclasses.replace(type_of(relu), dtype=torch.float64))
    often = Specialiser(gm)
    for length in (4, 3):
        propagated.clear()
        found = often.at((torch.ones(length, 5),))
        assert propagated
        assert said(found) == said(Specialiser(gm).at((torch.ones(length, 5),)))


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether sizes were free, each time that passes run from now on."""
    made: list[bool] = []
    real = graph_compiler.GraphCompiler._rewritten

    def rewritten(*args: Any, has_symbolic_sizes: bool = False) -> fx.GraphModule:
        made.append(has_symbolic_sizes)
        return real(*args, has_symbolic_sizes=has_symbolic_sizes)

    monkeypatch.setattr(graph_compiler.GraphCompiler, "_rewritten", rewritten)
    return made


def test_passes_run_once_for_all_sizes(rewritten: list[bool]) -> None:
    run_at(fxkit.compile(scaled, dynamic=True))
    assert rewritten == [True]


def test_passes_of_the_user_see_numbers() -> None:
    seen: list[Any] = []

    def look(gm: fx.GraphModule) -> fx.GraphModule:
        seen.append(type_of(next(iter(gm.graph.nodes))).shape)
        return gm

    run_at(fxkit.compile(scaled, dynamic=True, passes=(as_pass(look),)))
    assert seen == [(3, 5), (3, 6), (3, 7)]


# Programs in which passes run what torch makes of a call, the shapes they take, and for which of
# eight sizes the passes run: once for all, for those at which torch would make something else of
# it, and for an inner size of 1, which is captured by itself.
ASKING: dict[str, tuple[Any, tuple[int, ...], list[bool]]] = {
    "operands": (lambda x: torch.einsum("bij,bkj->bik", x, x).relu(), (2, 0, 8), [True]),
    "less one": (lambda x: torch.diff(x, n=2) * 2, (3, 0), [True, True]),
    "attention": (attention, (0, 2, 8), [True]),
    "numbers": (lambda x: F.local_response_norm(x, 3), (2, 5, 0, 8), [True, *7 * [False]]),
}


@pytest.mark.parametrize("name", ASKING)
def test_passes_that_ask_for_sizes_serve_those_with_the_same_answers(
    name: str, rewritten: list[bool]
) -> None:
    program, shape, runs = ASKING[name]
    compiled = fxkit.compile(program, dynamic=True)
    with torch.no_grad():
        for length in (9, 12, 7, 16, 5, 10, 3, 33):
            x = torch.randn([size or length for size in shape])
            torch.testing.assert_close(compiled(x), program(x))
    assert rewritten == runs


def test_passes_that_need_numbers_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(self: DeadCodeElimination, edit: Any, context: Any) -> None:
        if context.args is None:
            raise ArithmeticError("no numbers")
        real(self, edit, context)

    real = DeadCodeElimination.apply
    monkeypatch.setattr(DeadCodeElimination, "apply", apply)
    run_at(fxkit.compile(scaled, dynamic=True))


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2, -1)


def run_at(compiled: Any) -> None:
    with torch.no_grad():
        for length in (5, 6, 7):
            x = torch.randn(3, length)
            torch.testing.assert_close(compiled(x), scaled(x))
    assert all(module.has_kernels for module in compiled.compiled_modules)
