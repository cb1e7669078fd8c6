"""Sources of outside tensors, and the names of their attributes in a graph module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxkit.tracing import capture
from fxkit.tracing.values.sources import ValueSource, attribute_name


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
