"""What can't be read is refused where the operator is defined, with line, reason and remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxkit
from fxkit.errors import UnsupportedError

WEIGHT = torch.ones(3)
TABLE = {"a": 1.0}
called: list[str] = []


def note(x):
    called.append("note")
    return x


def recursive(x):
    return recursive(x - 1) if x > 0 else x


def prints(x):
    print(x)
    return x


def falls_off(x):  # noqa: RET503
    if x > 0:
        return x


def unset(x):
    if x > 0:
        y = x
    return y


def endless(x):
    while x > 1:
        x = x / 2
    return x


def over_an_operand(x):
    total = 0.0
    for i in range(x):
        total += i
    return total


def reads_a_tensor(x):
    return x * WEIGHT


def reads_a_dict(x):
    return x * TABLE["a"]


def writes_an_element(x):
    values = (x, x)
    values[0] = 1.0
    return x


def calls_torch(x):
    return torch.exp(x)


def has_a_method(x):
    return x.exp()


def indexes(x):
    return x[1]


def raises(x):
    if x < 0:
        raise ValueError("negative")
    return x


def asserts(x):
    assert x > 0
    return x


def uses_global(x):
    global WEIGHT
    return x


def tries(x):
    try:
        return 1 / x
    except ZeroDivisionError:
        return x


def nested(x):
    def inner(y):
        return y

    return inner(x)


def multiplies_matrices(x, y):
    return x @ y


def compares_identity(x):
    return 1.0 if x is None else x


def returns_text(x):
    return "a"


def returns_nothing(x):
    return


def unknown(x):
    return x + undefined_name  # noqa: F821  # type: ignore[name-defined]


def calls_gamma(x):
    return math.gamma(x)


def many_arguments(*xs):
    return xs[0]


def no_tensor(width=0.5):
    return width


def default_text(x, mode="a"):
    return x


def named_out(x, out):
    return x + out


def mixed_tuples(x):
    if x > 0:  # noqa: SIM108
        a = (x, x)
    else:
        a = (x, x, x)
    return a[0]


def calls_wrongly(x):
    return note(x, x)


def reads_several(x):
    return math.copysign(x)


def grows_a_list(x):
    values = (x, x)
    values.append(x)  # pyright: ignore
    return values[0]


def assigns_inside(x):
    return (y := x * 2) + y


def has_a_dict(x):
    return {"a": x}["a"]


def takes_a_slice(x):
    return x[::2]


def looks_into(x):
    return 1.0 if x in (1.0, 2.0) else 0.0


def yields(x):
    yield x


CASES = {
    grows_a_list: (2, "goes nowhere", "comprehension"),
    assigns_inside: (1, "an assignment inside of one", "line of its own"),
    has_a_dict: (1, "got a dict", "name of its own"),
    takes_a_slice: (1, "got a slice", "as a whole"),
    looks_into: (1, "comparison of numbers, got in", "x == 1 or x == 2"),
    yields: (1, "goes nowhere", "return what it computes"),
    recursive: (1, "recursive call of recursive", "loop"),
    prints: (1, "goes nowhere", "side effects"),
    falls_off: (1, "return a value on every path", "return"),
    unset: (3, "'y' to be set on every path", "before the branch"),
    endless: (1, "known to end after at most 1000 steps", "count its steps"),
    over_an_operand: (2, "range of numbers that are known", "break"),
    reads_a_tensor: (1, "'WEIGHT' to be a number or a function, got Tensor", "parameter"),
    reads_a_dict: (1, "'TABLE' to be a number or a function, got dict", "parameter"),
    writes_an_element: (2, "assignment to a local variable", "side effects"),
    calls_torch: (1, "a function that kernels have, got exp", "call math.exp"),
    has_a_method: (1, "got .exp of a scalar", "math.exp(x)"),
    indexes: (1, "element of a tuple", "neighbours"),
    raises: (2, "got raise", "math.nan"),
    asserts: (1, "got assert", "math.nan"),
    uses_global: (1, "got global", "side effects"),
    tries: (1, "got try", "by if"),
    nested: (1, "got a function inside a function", "outside"),
    multiplies_matrices: (1, "product of matrices", "*"),
    compares_identity: (1, "comparison of numbers, got is", "=="),
    returns_text: (1, "a real number, got str", "int or float"),
    returns_nothing: (1, "bare return", "return a number"),
    unknown: (1, "got 'undefined_name'", "define it above"),
    calls_gamma: (1, "a function that kernels have, got gamma", "math"),
    many_arguments: (0, "parameters with names", "fixed number"),
    no_tensor: (0, "at least one parameter without a default", "leave out"),
    default_text: (0, "finite number as the default of 'mode'", "tensors have none"),
    named_out: (0, "another name than 'out'", "rename"),
    mixed_tuples: (1, "scalars for 'a' on both paths", "same length"),
    calls_wrongly: (1, "arguments of note", "correct"),
    reads_several: (1, "a call of copysign", "table of functions"),
}


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_it_is_refused_with_its_line(function: Callable[..., Any]) -> None:
    offset, reason, remedy = CASES[function]
    with pytest.raises(UnsupportedError) as caught:
        fxkit.operator(function)
    error = caught.value
    assert error.message.startswith("expected ")
    assert reason in error.message
    assert remedy in (error.hint or "")
    line = function.__code__.co_firstlineno + offset
    assert f"test_refusals.py:{line}" in (error.source or ""), error
    assert not called


def test_what_is_no_function_of_scalars_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Python function of scalars"):
        fxkit.operator(math.exp)
    for other in (torch.relu, torch.nn.ReLU, torch.nn.ReLU().forward):
        with pytest.raises(UnsupportedError, match="Python function of scalars"):
            fxkit.operator(other)
    with pytest.raises(UnsupportedError, match="a name for the operator"):
        fxkit.operator(lambda x: x)
    with pytest.raises(UnsupportedError, match="a name for the operator, got 'lambda'"):
        fxkit.operator(lambda x: x, name="lambda")


@pytest.mark.parametrize("namespace", ["aten", "my.ops", "1st", "", "is"])
def test_namespaces_that_are_not_ones_own_are_refused(namespace: str) -> None:
    with pytest.raises(UnsupportedError, match="a namespace of your own"):
        fxkit.operator(lambda x: x * 5, name="relu", namespace=namespace)


def _scaled(x, k=1.0):
    return x * k


def _centred(row, weight):
    return [(x - max(row)) * w for x, w in zip(row, weight, strict=True)]


def test_arguments_of_other_kinds_are_told_by_their_names() -> None:
    scaled, x = fxkit.operator(_scaled), torch.ones(3)
    with pytest.raises(UnsupportedError, match=r"a number, .* for k of _scaled, got Tensor"):
        scaled(x, torch.tensor(2.0))
    for other in ([1.0, 2.0], "text", None, x.numpy(), 1j):
        with pytest.raises(UnsupportedError, match="a tensor or a number for x of _scaled"):
            scaled(other, k=2.0)  # pyright: ignore[reportArgumentType]
    centred, x = fxkit.row_operator(_centred), torch.ones(2, 3)
    with pytest.raises(UnsupportedError, match="rows for row, weight, got tensors without"):
        centred(torch.tensor(1.0), torch.tensor(2.0))
    with pytest.raises(UnsupportedError, match=r"one dimension, a number, got dim=\(0, 1\)"):
        centred(x, x, dim=(0, 1))
    with pytest.raises(UnsupportedError, match="a tensor or a number for weight"):
        centred(x, [1.0, 2.0, 3.0])


def test_a_refused_operator_is_not_registered() -> None:
    def halved(x):
        return x.half()

    with pytest.raises(UnsupportedError):
        fxkit.operator(halved)
    assert not hasattr(torch.ops.authored, "halved")
