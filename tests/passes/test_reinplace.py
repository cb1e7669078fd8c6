"""Results over dead operands: where it saves memory, and where it would show."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

import fxkit
from fxkit.passes.decompose_to_aten import DecomposeToAten
from fxkit.passes.functionalise import Functionalise
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.reinplace import Reinplace
from tests.passes.random_programs import check_passes_on
from tests.patterns.random_graphs import GRAPHS
from tests.patterns.test_random_graphs import _QUIET

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def reinplaced(program, *args, functional=False):
    gm = fxkit.symbolic_trace(program)
    first = [Functionalise()] if functional else [DecomposeToAten()]
    PassManager([*first, Reinplace()], verify="numerics", args=args).run(gm)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return [str(n.target).removeprefix("aten.") for n in calls]


def test_a_chain_takes_one_piece_of_memory():
    names = reinplaced(lambda x: torch.relu((x + 1) * 2).neg(), X)
    assert names == ["add.Scalar", "mul_.Scalar", "relu_.default", "neg_.default"]


def test_what_is_read_later_is_kept():
    def program(x):
        y = x + 1
        z = y * 2
        return z + y

    assert reinplaced(program, X) == ["add.Scalar", "mul.Scalar", "add_.Tensor"]


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * 2,  # the caller's
        lambda x: (y := x + 1, y * 2),  # returned too
        lambda x: ((y := x + 1).t(), y * 2),  # returned as a view
        lambda x: (x + 1).gt(0),  # another dtype
        lambda x: (x + 1).t() @ x,
        lambda x: x[:1].expand(4, 6).neg(),  # overlaps itself
    ],
)
def test_left_as_it_is(program):
    names = reinplaced(program, X)
    assert not any("_." in name for name in names if name.startswith(("mul", "neg", "gt")))


def test_an_operand_that_lies_in_the_same_memory_is_left():
    def program(x):
        y = x + 1
        return y[:2].add(y[2:]), y.new_zeros(6, 6)

    assert reinplaced(program, X)[3] == "add.Tensor"

    def with_transpose(x):
        y = x @ x.t()
        return y + y.t()

    assert reinplaced(with_transpose, X)[-1] == "add.Tensor"


def test_where_a_gradient_is_wanted_nothing_is_done():
    names = reinplaced(lambda x: (x + 1).exp() * 2, X.clone().requires_grad_())
    assert not any("_." in name for name in names)


def test_inputs_are_written_directly_again():
    def program(x):
        x.add_(1)
        x[0].mul_(3)
        return x.sum()

    names = reinplaced(program, X, functional=True)
    assert names.count("copy_.default") == 1  # into the row, not the whole
    assert "select_scatter.default" not in names
    assert names[0] == "add_.Scalar"


def test_an_input_whose_old_value_is_read_is_copied_to_at_the_end():
    def program(x):
        y = x.sin()
        old = x.clone()
        x.add_(1)
        return old * y

    def reads_old(x):
        new = x + 1
        old = x * 2
        x.copy_(new)
        return old

    assert "copy_.default" not in reinplaced(program, X, functional=True)
    assert reinplaced(reads_old, X, functional=True)[-1] == "copy_.default"


@settings(_QUIET, max_examples=50)
@given(gm=GRAPHS)
def test_random_programs(gm):
    check_passes_on(gm, [Functionalise(), Reinplace()])


@pytest.mark.sweep
@settings(_QUIET, max_examples=2000)
@given(gm=GRAPHS)
def test_many_random_programs(gm):
    check_passes_on(gm, [Functionalise(), Reinplace()])
