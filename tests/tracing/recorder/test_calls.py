"""How functions that torch reports are spelt and classified."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxkit.tracing.recorder.calls import DataRead, spelling_of

Tensor = torch.Tensor


@pytest.mark.parametrize(
    ("func", "op", "target", "name"),
    [
        (torch.relu, "call_function", torch.relu, "relu"),
        (F.gelu, "call_function", F.gelu, "gelu"),
        (Tensor.relu, "call_method", "relu", "relu"),
        (Tensor.add_, "call_method", "add_", "add_"),
        (Tensor.__getitem__, "call_function", operator.getitem, "getitem"),
        (Tensor.__setitem__, "call_function", operator.setitem, "setitem"),
        (Tensor.__rsub__, "call_function", operator.sub, "sub"),
        (Tensor.__pow__, "call_function", operator.pow, "pow"),
        (Tensor.__bool__, "call_function", bool, "bool"),
        (Tensor.T.__get__, "call_function", getattr, "t"),
        (torch.ops.aten.add.Tensor, "call_function", torch.ops.aten.add.Tensor, "add_tensor"),
    ],
)
def test_spelling(func: Any, op: str, target: Any, name: str):
    spelling = spelling_of(func)
    assert (spelling.op, spelling.target, spelling.name) == (op, target, name)


@pytest.mark.parametrize("func", [Tensor.size, Tensor.shape.__get__, Tensor.dim, Tensor.__len__])
def test_metadata(func: Any):
    assert spelling_of(func).reading is DataRead.METADATA


@pytest.mark.parametrize("func", [Tensor.item, torch.equal, Tensor.is_leaf.__get__])
def test_values(func: Any):
    assert spelling_of(func).reading is DataRead.VALUE


@pytest.mark.parametrize(
    ("func", "is_dynamic"),
    [
        (torch.nonzero, True),
        (Tensor.masked_select, True),
        (Tensor.unique, True),
        (torch._VF._pack_padded_sequence, True),
        (F.one_hot, True),
        (torch.relu, False),
        (Tensor.view, False),
    ],
)
def test_shapes_that_depend_on_numbers(func: Any, is_dynamic: bool):
    assert spelling_of(func).is_dynamic is is_dynamic


@pytest.mark.parametrize(
    "func",
    [torch.rand, torch.randn_like, F.dropout, Tensor.normal_, torch.lstm, torch.multinomial],
)
def test_whatever_draws_random_numbers_may_be_random(func: Any):
    assert spelling_of(func).may_be_random


@pytest.mark.parametrize("func", [torch.relu, Tensor.add, Tensor.__and__, torch.matmul])
def test_common_calls_are_never_random(func: Any):
    assert not spelling_of(func).may_be_random


def test_reflected_operand_order():
    assert spelling_of(Tensor.__rsub__).swap
    assert not spelling_of(Tensor.__floordiv__).swap


@pytest.mark.parametrize(
    "func",
    [Tensor.backward, Tensor.register_hook, Tensor.grad.__get__, Tensor.data.__set__, Tensor.set_],
)
def test_refused(func: Any):
    assert spelling_of(func).refusal
