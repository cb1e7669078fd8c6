"""Each function that can be read, alone: taken apart into ATen and core, it is the same."""

from __future__ import annotations

import builtins
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fxkit
from fxkit.authoring.operators.callables import FUNCTIONS, functions_page
from fxkit.authoring.operators.derivative import partials_of
from fxkit.authoring.operators.elementwise import ElementwiseOperator
from fxkit.authoring.operators.primitives import PRIMITIVES, REAL, term
from fxkit.authoring.operators.terms import operand
from fxkit.passes import DecomposeToAten, DecomposeToCore
from fxkit.passes.decomposition.core_operators import is_core
from fxkit.torch_adapters.operators import OpOverload
from tests.authoring import test_row_loops, test_row_methods, test_rowwise
from tests.generated_text import HoldPage
from tests.sampling import one_in

BINARY = (
    "copysign",
    "atan2",
    "fmod",
    "nextafter",
    "hypot",
    "pow",
    "ldexp",
    "remainder",
    "max",
    "min",
)

# At these, operators are asked for finite results, zeros, infinite ones and none.
POINTS = [
    -2.5,
    -1.0,
    -0.5,
    -0.0,
    0.0,
    0.3,
    0.5,
    1.0,
    2.0,
    2.5,
    3.5,
    40.0,
    math.inf,
    -math.inf,
    math.nan,
]


def written(function: Callable[..., object], path: Path) -> ElementwiseOperator:
    """Return an operator that is one call of a function, read from a file."""
    name = function.__name__
    home = "" if hasattr(builtins, name) and getattr(builtins, name) is function else "math."
    call = f"{home}{name}(x, y)" if name in BINARY else f"{home}{name}(x)"
    path.write_text(f"import math\n\n\ndef {name}_of(x, y):\n    return ({call}) * 1.0 + y * 0.0\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return fxkit.operator(namespace="readable")(getattr(module, f"{name}_of"))


def by_core(program: Callable[..., object], *args: torch.Tensor) -> torch.fx.GraphModule:
    gm = fxkit.capture(program, args).graph_module
    fxkit.PassManager([DecomposeToAten(), DecomposeToCore()], args=args).run(gm)
    targets = [node.target for node in gm.graph.nodes]
    assert all(is_core(target) for target in targets if isinstance(target, OpOverload))
    return gm


@pytest.mark.parametrize("function", one_in(2, list(FUNCTIONS)), ids=lambda f: f.__name__)
def test_a_function_is_the_same_by_core_operators(
    function: Callable[..., object], tmp_path: Path
) -> None:
    operator = written(function, tmp_path / "one_call.py")
    points = torch.tensor(POINTS, dtype=torch.float64)
    operands = [x.flatten() for x in torch.meshgrid(points, points, indexing="ij")]
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        given = [x.to(dtype) for x in operands]
        (found,) = several(by_core(lambda x, y: operator(x, y), *given)(*given))
        expected = operator(*given)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        if function is not math.lgamma:
            is_number = ~expected.isnan()
            assert torch.equal(found.signbit()[is_number], expected.signbit()[is_number])


def test_each_function_of_floats_has_a_derivative() -> None:
    for op, primitive in PRIMITIVES.items():
        if primitive.rule == REAL:
            operands = [operand(name) for name in "xyz"[: primitive.arity]]
            assert any(partials_of(term(op, *operands))), op


def several(found: object) -> tuple[torch.Tensor, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)  # type: ignore[return-value]


ROWS = [*test_rowwise.OPERATORS, *test_row_loops.OPERATORS, *test_row_methods.OPERATORS]


@pytest.mark.parametrize("operator", one_in(3, ROWS), ids=lambda op: op.__name__)
def test_an_operator_on_rows_is_the_same_by_core_operators(operator) -> None:
    rows = operator.definition.rows
    shapes = [(4, 7) if name in rows else (4,) for name in operator.definition.tensors]
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    found = several(by_core(lambda *tensors: operator(*tensors), *given)(*given))
    for ours, expected in zip(found, several(operator(*given)), strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_documentation_lists_them(hold_page: HoldPage) -> None:
    hold_page("operators_of_your_own.md", "functions", functions_page())
