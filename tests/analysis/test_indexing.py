"""Indices that are numbers in tensors, whose values no type depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxkit import symbolic_trace
from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import InvalidGraphError
from fxkit.ir.types import TensorType, type_of
from fxkit.lower import to_cpp

X, PLACE = torch.randn(4, 6), torch.tensor(1)


def written(x: Tensor, i: Tensor) -> Tensor:
    y = x * 2
    y[i + 1] = 7.0
    return y[i] * 3


PROGRAMS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, i: (x * 2)[i + 1] + 1,
    lambda x, i: (x * 2)[i] + 1,
    lambda x, i: x[x.argmax(1)[0] % 4] * 2,
    lambda x, i: (x * 2)[:, i - 2] + 1,
    lambda x, i: (x * 2)[i - 2, ..., i.int()] + 1,
    lambda x, i: (x * 2)[None, i, None] + 1,
    lambda x, i: (x * 2)[i, x[0] > -9] + 1,
    lambda x, i: (x * 2)[torch.tensor([1, 2]), i] + 1,
    written,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_number_in_a_tensor_is_an_index(program: Callable[[Tensor, Tensor], Tensor]) -> None:
    gm = symbolic_trace(program)
    lowered = to_cpp(gm, (X, PLACE))
    expected = program(X, PLACE)
    torch.testing.assert_close(lowered(X, PLACE), expected)
    assert any(region.kernel for region in lowered.regions)
    other = X.flip(0)
    torch.testing.assert_close(lowered(other, PLACE * 0), program(other, PLACE * 0))


def test_its_type_is_that_of_any_other() -> None:
    gm = symbolic_trace(lambda x, i: x[i + 1].t())
    propagate_types(gm, (X[:, None], PLACE))
    (node,) = (n for n in gm.graph.nodes if n.name == "getitem")
    known = type_of(node)
    assert isinstance(known, TensorType)
    assert (known.shape, known.stride) == ((1, 6), (6, 1))


@pytest.mark.parametrize("program", [lambda x, i: x[i + 1 :] * 2, lambda x, i: x[i > 0] * 2])
def test_sizes_that_numbers_decide_stay_unknown(
    program: Callable[[Tensor, Tensor], Tensor],
) -> None:
    with pytest.raises(InvalidGraphError, match="known without the data"):
        to_cpp(symbolic_trace(program), (X, PLACE))
