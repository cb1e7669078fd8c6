"""No rule lets two tensors share memory that did not: a write to one would show in the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx

import fxkit
from fxkit.patterns.inputs import captures_of, make_operands, operand_cases, pattern_module
from fxkit.patterns.rewriting import Rule
from fxkit.patterns.rules import RULES
from tests.sampling import one_in

ATEN = torch.ops.aten


def programs(rule: Rule) -> Iterator[tuple[fx.GraphModule, tuple[torch.Tensor, ...]]]:
    """Yield modules that compute a rule's pattern of their inputs, and these."""
    generator = torch.Generator().manual_seed(0)
    for sample, dtype, specials in operand_cases(rule)[:24]:
        if specials or dtype in (torch.bfloat16, torch.float16):
            continue
        values = make_operands(rule, sample, dtype, (), generator)
        tensors = [values[name] for name in captures_of(rule)]
        try:
            gm = pattern_module(rule, values)
            args = tuple(t.detach() for t in tensors if isinstance(t, torch.Tensor))
            gm(*args)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            continue  # these operands are none for the pattern
        yield gm, args


def written_to(gm: fx.GraphModule, what: str) -> None:
    """Take away the copies that a pattern's module makes; clear results or inputs at the end."""
    graph = gm.graph
    clones = [node for node in graph.nodes if node.target is torch.clone]
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    results = [n.args[0] for n in clones if n.args[0].op != "placeholder"]
    results = [n for n in results if n.target is not torch.detach]
    for clone in clones:
        clone.replace_all_uses_with(clone.args[0])
        graph.erase_node(clone)
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):
        for node in results if what == "results" else inputs:
            graph.call_function(ATEN.zero_.default, (node,))
        read = inputs if what == "results" else results
        output.args = (tuple(graph.call_function(ATEN.clone.default, (n,)) for n in read),)
    graph.eliminate_dead_code(lambda node: node.target is not torch.detach)
    gm.recompile()


@pytest.mark.parametrize(("what", "name"), one_in(2, ["results", "inputs"], RULES))
def test_what_is_written_shows_where_it_did(name: str, what: str) -> None:
    rule = RULES[name]
    for gm, args in programs(rule):
        written_to(gm, what)
        copies = [arg.clone() for arg in args]
        expected = gm(*copies)
        fxkit.propagate_types(gm, args)
        fxkit.rewrite(gm, rule)
        found = gm(*(arg.clone() for arg in args))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    "copy",
    [lambda x: x.double().float(), lambda x: torch.nn.functional.pad(x, (0, 0))],
    ids=["cast there and back", "padded by nothing"],
)
def test_what_was_a_copy_is_one(copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = copy(x)
        y.add_(1)
        return x * 2, y

    compiled = fxkit.compile(program)
    for _ in range(3):
        x = torch.ones(2, 3)
        first, second = compiled(x)
        assert (x == 1).all() and (first == 2).all() and (second == 2).all()


def test_a_cast_back_is_still_a_copy_for_the_caller() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin() * 2
        return y.double().float(), y

    compiled = fxkit.compile(program)
    for _ in range(3):
        first, second = compiled(torch.ones(2, 3))
        assert first.data_ptr() != second.data_ptr()


def test_results_of_one_operator_lie_in_memory_of_their_own() -> None:
    def together(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.var_mean(x, 0)
        return both[0], both[1]

    moments = fxkit.rule(lambda x: (x.var(0), x.mean(0)), together, exact=False)
    gm = fxkit.capture(lambda x: (x.var(0), x.mean(0)), (torch.randn(3, 4),)).graph_module
    assert fxkit.rewrite(gm, moments).count == 1
