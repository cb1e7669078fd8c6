"""Values are taken apart into tensors and tokens, and built again with other tensors."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from fxkit.errors import CaptureError
from fxkit.tracing.values.contents import content_of
from fxkit.tracing.values.structure import Blueprint, Parts

ONE, TWO, THREE = torch.ones(1), torch.ones(2), torch.ones(3)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def _parts(value: Any) -> Parts:
    parts = Parts()
    parts.add(value, "args[0]")
    return parts


def test_tensors_lie_in_order_with_their_paths():
    parts = _parts({"b": [ONE, (TWO, 3)], "a": Holder(THREE)})
    assert [tensor.numel() for tensor in parts.tensors] == [1, 2, 3]
    assert parts.tensor_paths == ["args[0]['b'][0]", "args[0]['b'][1][0]", "args[0]['a'].value"]


@pytest.mark.parametrize(
    ("some", "other", "same"),
    [
        ([ONE, 1], [TWO, 1], True),
        ([1], [2], False),
        ([1], [True], False),
        ([0.0], [-0.0], False),
        ([float("nan")], [float("nan")], True),
        ([1], (1,), False),
        ({"a": 1}, {"b": 1}, False),
        (Holder(1), Holder(1), True),
        (Holder(1), Holder(2), False),
        ({1, 2}, {2, 1}, True),
        (torch.float32, torch.float64, False),
        (None, ONE, False),
    ],
)
def test_tokens_are_equal_when_all_but_the_tensors_is(some: Any, other: Any, same: bool):
    assert (_parts(some).tokens == _parts(other).tokens) is same


def test_an_object_that_is_there_twice_is_no_pair_of_equal_objects():
    shared = [1]
    assert _parts([shared, shared]).tokens != _parts([[1], [1]]).tokens


def _rebuilt(value: Any, new: list[Any], containers: list[Any] | None = None) -> Any:
    seen: list[torch.Tensor] = []

    def place(tensor: torch.Tensor, path: str) -> int:
        seen.append(tensor)
        return len(seen) - 1

    existing = {id(container): i for i, container in enumerate(containers or [])}
    return Blueprint(value, place, existing).build(new, ["the new one"], {})


def test_values_are_built_with_new_tensors():
    value = {"a": [ONE, None, 3], "b": Holder((TWO, {"c": ONE}))}
    built = _rebuilt(value, ["x", "y", "z"])
    assert built["a"] == ["x", None, 3]
    assert type(built["b"]) is Holder and built["b"].value == ("y", {"c": "z"})
    assert built["a"] is not value["a"]


def test_shared_and_circular_objects_stay_so():
    shared: list[Any] = [ONE]
    shared.append(shared)
    built = _rebuilt((shared, shared), ["x"])
    assert built[0] is built[1] and built[0][1] is built[0] and built[0][0] == "x"


def test_containers_of_the_call_are_handed_on():
    given = [ONE]
    assert _rebuilt({"given": given}, [], [given]) == {"given": "the new one"}


def test_what_can_not_be_built_again_is_refused():
    with pytest.raises(CaptureError, match=r"in the result\[1\], got generator"):
        Blueprint([1, (i for i in ())], lambda tensor, path: 0, {}, "the result")


def test_changed_content_is_put_into_the_same_container():
    target: list[Any] = [1]
    plan = Blueprint.of_content([ONE, 2], lambda tensor, path: 0, {}, "args[0]")
    plan.refill(target, ["x"], [], {})
    assert target == ["x", 2]


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, collections.defaultdict(list, a=[1]), {1}, Holder(1)]
)
def test_content_of_what_can_be_changed_can_be_filled(value: Any):
    content = content_of(value)
    assert content is not None and content.fill is not None and content.make is not None
    target = content.make()
    content.fill(target, content.values)
    assert vars(target) == vars(value) if isinstance(value, Holder) else target == value
