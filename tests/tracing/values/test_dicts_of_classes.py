"""Results of subclasses of `dict`: of the same class, with the same items and attributes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from fxkit.tracing.captured import Captured


class Output(OrderedDict):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.steps = 0
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.steps += 1
        self.last = value


class Plain(dict):
    def __iter__(self) -> Any:
        return iter(sorted(dict.__iter__(self), reverse=True))


@pytest.mark.parametrize("kind", [Output, Plain])
def test_a_result_of_a_subclass_of_dict(kind: type) -> None:
    def program(x: torch.Tensor) -> Any:
        found = kind(loss=x.sum(), name="run", rest=[x * 2, None])
        found.owner = found
        return found

    captured = Captured(program)
    for size in (2, 2, 3, 5):
        x = torch.arange(float(size))
        got, expected = captured(x), program(x)
        assert type(got) is kind and str(dict.items(got)) == str(dict.items(expected))
        assert list(vars(got)) == list(vars(expected)) and got.owner is got
        if kind is Output:
            assert got.steps == 3 and got.last is got["rest"] and list(got) == list(expected)
    assert captured.whole


class Made(dict):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls)


def test_one_that_makes_itself_runs_in_python() -> None:
    captured = Captured(lambda x: Made(a=x * 2))
    for _ in range(2):
        assert captured(torch.ones(2))["a"].equal(torch.full((2,), 2.0))
    assert "can't be built again" in captured.explain(torch.ones(2))
