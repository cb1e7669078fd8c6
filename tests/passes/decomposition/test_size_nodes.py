"""Sizes that are expressions, computed by nodes where calls of torch become operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

import fxkit
from fxkit.analysis.type_inference.type_facts import concrete_numbers
from fxkit.ir.session import EditSession
from fxkit.ir.types import type_of
from fxkit.lower.compiling.specialising import holds_expressions
from fxkit.passes.decompose_for_kernels import DecomposeForKernels
from fxkit.passes.decompose_to_aten import DecomposeToAten
from fxkit.passes.decompose_to_core import DecomposeToCore
from fxkit.passes.decomposition.size_nodes import SizeNodes
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.passes.manager.manager import PassManager

PROGRAMS: dict[str, Any] = {
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "diff": lambda x: torch.diff(x, n=2),
    "unflatten": lambda x: x.unflatten(1, (-1, 2)),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([1], [1])),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "passes", [(DecomposeForKernels(),), (DecomposeToAten(), DecomposeToCore())]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_of_symbolic_sizes_runs_at_others(name: str, passes: Any) -> None:
    gm = fx.symbolic_trace(PROGRAMS[name])
    example = torch.randn(2, 6, 4)
    fxkit.propagate_types(gm, (example,), dynamic_shapes=({1: "length"},))
    PassManager(passes).run(gm)
    assert not holds_expressions(gm)
    for length in (6, 10, 24):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(gm(x), PROGRAMS[name](x))


@pytest.fixture
def edit() -> EditSession:
    gm = fx.symbolic_trace(lambda x: torch.relu(x))
    fxkit.propagate_types(gm, (torch.randn(6, 4),), dynamic_shapes=({0: "n", 1: "m"},))
    return EditSession(gm)


def number(edit: EditSession, make: Any) -> Any:
    """Return one of torch's symbolic numbers, made of the sizes of the graph's input."""
    (x,) = edit.graph.find_nodes(op="placeholder")
    return make(*concrete_numbers(type_of(x).shape))


@pytest.mark.parametrize(
    "make",
    [
        lambda n, m: 2 * n + m,
        lambda n, m: (n * m) // 3 - 1,
        lambda n, m: n % m + n**2,
        lambda n, m: n,
    ],
)
def test_nodes_compute_expressions(edit: EditSession, make: Any) -> None:
    output = edit.graph.output_node()
    sizes = SizeNodes(edit, (), output)
    wanted = number(edit, make)
    sizes.check(wanted)
    first, second = sizes.in_place([wanted, wanted])
    assert first is second
    edit.set_args(output, ((output.args[0], first),))
    edit.gm.recompile()
    for shape in ((6, 4), (9, 2), (31, 7)):
        assert edit.gm(torch.randn(shape))[1] == make(*shape)


def test_what_nodes_cannot_compute_is_refused(edit: EditSession) -> None:
    other = fx.symbolic_trace(lambda x: torch.relu(x))
    fxkit.propagate_types(other, (torch.randn(6),), dynamic_shapes=({0: "elsewhere"},))
    (x,) = other.graph.find_nodes(op="placeholder")
    (size,) = concrete_numbers(type_of(x).shape)
    sizes = SizeNodes(edit, (), edit.graph.output_node())
    with pytest.raises(Unrecordable, match="no operand has the size elsewhere"):
        sizes.check([size * 2])
    with pytest.raises(Unrecordable, match="can't compute"):
        sizes.in_place(number(edit, lambda n, m: torch.sym_max(n, m)))


def test_numbers_that_are_known_stay_numbers(edit: EditSession) -> None:
    sizes = SizeNodes(edit, (), edit.graph.output_node())
    assert sizes.in_place([1, 2.5, None]) == [1, 2.5, None]
