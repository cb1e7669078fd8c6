"""Tensors from outside are found where they lie, and changes around them are noticed."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from fxkit.tracing import capture
from fxkit.tracing.values.sources import Contents, Surroundings, ValueSource, attribute_name

TABLE = torch.ones(3)
FIVE = torch.ones(5)


def uses_a_global(a: torch.Tensor) -> torch.Tensor:
    return a * TABLE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.twin = self.layer
        self.lists = {"key": [torch.ones(1)]}
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return uses_a_global(self.layer(a))


def _names(surroundings: Surroundings) -> set[str]:
    return {places[0].name for _, places in surroundings.places.values()}


def test_parameters_buffers_and_plain_attributes():
    found = Surroundings.of(Net(), [])
    assert _names(found) >= {"layer.weight", "layer.bias", "steps", "lists.key.0"}
    assert [path for path, _ in found.found] == ["", "layer"]


def test_globals_closures_defaults_and_partials():
    captured, given = torch.ones(2), torch.ones(4)

    def fn(a: torch.Tensor, b: torch.Tensor = FIVE) -> torch.Tensor:
        return uses_a_global(a) * captured + b

    found = Surroundings.of(functools.partial(fn, given), [])
    assert _names(found) >= {"captured", "default_0", "args.0"}
    assert "TABLE" in _names(Surroundings.of(uses_a_global, []))
    assert "TABLE" in _names(Surroundings.of(fn, []))


def test_all_places_of_a_tensor_are_known():
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net[1].weight = net[0].weight
    _, places = Surroundings.of(net, []).places[id(net[0].weight)]
    assert [place.name for place in places] == ["0.weight", "1.weight"]


def test_place_that_is_gone():
    holder = {"a": 1}
    place = ValueSource(holder, "a", "a")
    assert place.read() == 1
    holder.clear()
    assert place.read() is not None and place.read() != 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("encoder.0.weight", "encoder.0.weight"),
        ("odd name!.x", "odd_name.x"),
        ("code", "outer_code"),
        ("training", "outer_training"),
        ("0.weight", "0.weight"),
        ("cache.cpu", "cache.outer_cpu"),
        ("cache.training.0", "cache.outer_training.0"),
    ],
)
def test_names_of_attributes(name: str, expected: str):
    assert attribute_name(ValueSource({}, "", name), set()) == expected


@pytest.mark.parametrize("key", ["cpu", "half", "forward", "training", "_buffers", "weight", 0])
def test_tensors_are_kept_under_any_key(key: object):
    kept = {key: torch.ones(3)}
    captured = capture(lambda a: a * kept[key], (torch.ones(3),))
    for factor in (1.0, 2.0):
        kept[key].fill_(factor)
        assert torch.equal(captured(torch.ones(3)), torch.full((3,), factor))
    assert captured.recaptures == 0


def test_names_do_not_collide():
    taken: set[str] = set()
    names = [
        attribute_name(ValueSource({}, "", name), taken) for name in ("a.b", "a", "a.b", "a.b.c")
    ]
    assert names == ["a.b", "a_1", "a_2.b", "a_3.b.c"]
    root = nn.Module()
    for name in names:
        *path, last = name.split(".")
        owner = root
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = getattr(owner, step)
        assert isinstance(owner, nn.Module)
        owner.register_buffer(last, torch.ones(1))


def test_changes_are_noticed():
    net = Net()
    contents = Contents(Surroundings.of(net, []))
    assert contents.change() is None
    net.lists["key"].append(torch.ones(1))
    assert contents.change() == "lists.key"
    contents = Contents(Surroundings.of(net, []))
    net.steps = torch.ones(())
    assert contents.change() == "steps"
    contents = Contents(Surroundings.of(net, []))
    net.fresh = 1  # type: ignore[assignment]
    assert contents.change() == "fresh"
