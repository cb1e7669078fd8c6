"""Numbers and lists of other classes, given to torch's functions, are held as plain ones."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.immutable_collections import immutable_list

import fxkit
from fxkit.tracing.captured import Captured
from tests.tracing.faithful import assert_faithful


class Items(list[Any]):
    """A list of the user's own."""


class Pair(NamedTuple):
    """A tuple of the user's own."""

    first: Any
    second: Any


class Count:
    """What Python takes for an integer."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


def _enumerated(number: int) -> enum.IntEnum:
    return enum.IntEnum("Number", {"one": number}).one  # type: ignore[attr-defined]


LISTS: tuple[Callable[[Any], Any], ...] = (
    *(list, tuple, Items, immutable_list),
    lambda items: Pair(*items),
)
NUMBERS: tuple[Callable[[int], Any], ...] = (int, Count, np.int64, np.int8, _enumerated)

# Of two numbers whose product is 12, by the classes above.
PROGRAMS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "reshape": lambda x, of, it: x.reshape(of([it(3), it(4)])),
    "view": lambda x, of, it: x.view(of([it(4), it(3)])),
    "expand": lambda x, of, it: x[:1].view(1, 1).expand(of([it(2), it(5)])),
    "full": lambda x, of, it: x.sum() + torch.full(of([it(2), it(3)]), 2.0),
    "sum": lambda x, of, it: x.view(3, 4).sum(of([it(0), it(1)])),
    "split": lambda x, of, it: torch.cat(x.split(of([it(5), it(7)]))[::-1]),
    "index": lambda x, of, it: x[it(2)] + x[it(3) :],
    "items": lambda x, of, it: x[list(map(int, of([it(1), it(2)])))],
    "repeat": lambda x, of, it: x.repeat(of([it(2), it(1)])),
    "roll": lambda x, of, it: x.view(3, 4).roll(of([it(1), it(2)]), of([it(0), it(1)])),
    "pad": lambda x, of, it: F.pad(x, of([it(1), it(2)])),
    "cat": lambda x, of, it: torch.cat(of([x, x * 2])),
    "stack": lambda x, of, it: torch.stack(of([x, x * 2])),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_keeps_its_results(name: str) -> None:
    draw = random.Random(name)
    for of in LISTS:
        it = draw.choice(NUMBERS)

        def program(x: Tensor, of: Any = of, it: Any = it) -> Tensor:
            return PROGRAMS[name](x, of, it) * 2

        x, y = torch.randn(2, 12)
        for mode in ("whole", "aten"):
            captured = fxkit.capture(program, (x,), mode=mode)
            assert torch.equal(captured(y), program(y))
            assert captured.recaptures == 0 and not captured.opaque_calls
            found = captured.graph_module.graph.nodes
            kinds = {type(item) for node in found for item in _leaves((node.args, node.kwargs))}
            assert kinds <= PLAIN


PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, slice}


def _leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []
    torch.fx.node.map_aggregate(
        value, lambda leaf: leaves.append(leaf) if not isinstance(leaf, torch.fx.Node) else leaf
    )
    return leaves


def test_a_number_that_changes_is_seen() -> None:
    def make() -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
        count = Count(3)

        def program(x: Tensor, number: int) -> Tensor:
            result = x.reshape([count, 12 // count.number]) * 2
            count.number = number
            return result

        return program, [(torch.randn(12), number) for number in (4, 4, 6, 2, 3)]

    assert_faithful(make)


def test_enumerations_of_torch_are_numbers() -> None:
    """What `F.scaled_mm` hands on; as text, `<_ScalingType.TensorWise: 0>` is no Python."""
    a = torch.randn(16, 32).to(torch.float8_e4m3fn)
    b = torch.randn(16, 32).to(torch.float8_e4m3fn).t()
    one = torch.ones(())

    def program(a: Tensor, b: Tensor) -> Tensor:
        kind = F.ScalingType.TensorWise
        return F.scaled_mm(a, b, one, kind, one * 2, kind)

    try:
        expected = program(a, b)
    except NotImplementedError:
        pytest.skip("this torch multiplies no float8 on the CPU")
    captured = Captured(program)
    for _ in range(2):
        assert torch.equal(captured(a, b), expected)
    assert "ScalingType" not in captured.graph_module.code and captured.recaptures == 0


@pytest.mark.parametrize("value", [np.float16(2.5), np.int8(3), np.array([1, 2], dtype=np.int16)])
def test_what_has_a_dtype_keeps_it(value: Any) -> None:
    def make() -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
        return lambda x: x + torch.as_tensor(value).sum(), [(torch.zeros(2, dtype=torch.int8),)] * 2

    assert_faithful(make)
