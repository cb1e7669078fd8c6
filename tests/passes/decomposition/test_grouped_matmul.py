"""Products of groups of matrices as core operators: each kind, empty groups, rows of no group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxkit
from fxkit.passes import DecomposeToAten, DecomposeToCore
from fxkit.passes.decomposition.core_operators import is_core
from fxkit.passes.decomposition.grouped_matmul import grouped_matmul
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters import operators

ENDS = torch.tensor([2, 2, 7, 16], dtype=torch.int32)
KINDS = {
    "rows of groups": ((16, 16), (4, 16, 24), ENDS),
    "columns of groups": ((4, 8, 16), (16, 16), ENDS),
    "inner sizes of groups": ((8, 16), (16, 24), ENDS),
    "a batch": ((4, 5, 16), (4, 16, 24), None),
    "one group": ((16, 16), (1, 16, 8), ENDS[-1:]),
    "empty groups only": ((0, 16), (4, 16, 8), ENDS * 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_of_groups_is_computed_by_core_operators(kind: str, dtype: torch.dtype) -> None:
    first, second, ends = KINDS[kind]
    a, b = torch.randn(first).to(dtype), torch.randn(second).to(dtype)
    if kind == "rows of groups":
        b[0, 3, 4] = float("nan")  # stays in its group
    operands = (a, b) if ends is None else (a, b, ends)

    grouped_mm = operators.grouped_product()

    def program(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        return grouped_mm(a, b, offs=ends) * 2

    gm = fxkit.capture(program, operands).graph_module
    result = fxkit.PassManager(
        [DecomposeToAten(), DecomposeToCore()], args=operands, verify="structure"
    ).run(gm)
    assert [note for record in result.records for note in record.notes] == []
    assert all(is_core(n.target) for n in gm.graph.nodes if n.op == "call_function")
    torch.testing.assert_close(gm(*operands), program(*operands), equal_nan=True)


@pytest.mark.parametrize("given", [
    {"bias": torch.ones(8), "ends": ENDS}, {"out_dtype": torch.bfloat16, "ends": ENDS}, {},
])  # fmt: skip
def test_what_has_no_form_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Unrecordable):
        grouped_matmul(torch.ones(16, 16), torch.ones(4, 16, 8), **given)
