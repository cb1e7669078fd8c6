"""Whatever guard fails, the explanation says what changed, and names a line of the user's."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxkit import capture
from fxkit.tracing.captured import Captured
from fxkit.tracing.graph_cache import MAX_GRAPHS
from fxkit.tracing.recaptures import RecaptureWarning

gain = 2.0
table = {"scale": 2.0, "names": ["a", "b"]}
weight = torch.ones(4)
numbers = np.ones(2)
level = contextvars.ContextVar("level", default=2)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def other_helper(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Config:
    factor = 2.0

    def __init__(self) -> None:
        self.bias = 1.0


config = Config()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.rate = 2.0
        self.sizes = [1, 2]
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor, scale: Any = 1) -> torch.Tensor:
        x = self.layer(x) * self.mean
        x = self.drop(x) * self.rate + self.sizes[0]
        return x * scale


net = Net()


def of_tensors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def of_values(x: torch.Tensor, options: Any) -> torch.Tensor:
    return x * options["by"]


def of_state(x: torch.Tensor) -> torch.Tensor:
    return x * gain + table["scale"] + len(table["names"]) + weight + numbers.sum()


def of_objects(x: torch.Tensor) -> torch.Tensor:
    return helper(x) + config.bias + Config.factor


def of_context(x: torch.Tensor) -> torch.Tensor:
    return x * level.get()


def of_environment(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if os.environ.get("FXKIT_TEST_FLAG") else x


def of_closure() -> Any:
    inner = 2.0

    def reads(x: torch.Tensor) -> torch.Tensor:
        return x * inner

    def sets(value: float) -> None:
        nonlocal inner
        inner = value

    return reads, sets


reads_closure, set_closure = of_closure()


def of_numbers(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 100:
        return x
    return x * x.max().item()


def of_sizes(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 6:
        return x
    return x * 2


def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mul_(2) + y


def new(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


@contextlib.contextmanager
def _set(target: Any, name: Any, value: Any) -> Iterator[None]:
    is_item = isinstance(target, (dict, list))
    before = target[name] if is_item else getattr(target, name)
    put = (lambda it: target.__setitem__(name, it)) if is_item else None
    (put or (lambda it: setattr(target, name, it)))(value)
    try:
        yield
    finally:
        (put or (lambda it: setattr(target, name, it)))(before)


@contextlib.contextmanager
def _global(name: str, value: Any) -> Iterator[None]:
    with _set(globals(), name, value):
        yield


@contextlib.contextmanager
def _training() -> Iterator[None]:
    net.drop.train()
    yield
    net.drop.eval()


@contextlib.contextmanager
def _hooked() -> Iterator[None]:
    handle = net.layer.register_forward_hook(lambda module, args, result: result + 1)
    yield
    handle.remove()


@contextlib.contextmanager
def _double() -> Iterator[None]:
    net.layer.double()
    yield
    net.layer.float()


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _level(value: int) -> Iterator[None]:
    token = level.set(value)
    yield
    level.reset(token)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    os.environ["FXKIT_TEST_FLAG"] = "1"
    yield
    del os.environ["FXKIT_TEST_FLAG"]


@contextlib.contextmanager
def _closure() -> Iterator[None]:
    set_closure(3.0)
    yield
    set_closure(2.0)


NOTHING = contextlib.nullcontext
X = (2, 4)
SHARED = torch.ones(*X)
MEMORY = torch.ones(9)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any, tuple[Any, ...], str]] = {
    "shape": (of_tensors, (new(*X), new(*X)), NOTHING, (new(3, 4), new(3, 4)), "got f32[3,4]"),
    "dtype": (of_tensors, (new(*X), new(*X)), NOTHING, (new(*X), new(*X).double()), "got f64"),
    "stride": (of_tensors, (new(*X), new(*X)), NOTHING, (new(4, 2).t(), new(*X)), "strides (1, 2)"),
    "device": (
        of_tensors,
        (new(*X), new(*X)),
        NOTHING,
        (new(*X).to("meta"), new(*X).to("meta")),
        "on meta",
    ),
    "gradient": (
        of_tensors,
        (new(*X), new(*X)),
        NOTHING,
        (new(*X), new(*X).requires_grad_()),
        "requiring grad",
    ),
    "class": (
        of_tensors,
        (new(*X), new(*X)),
        NOTHING,
        (nn.Parameter(new(*X)), new(*X)),
        "of class Parameter",
    ),
    "identity": (of_tensors, (new(*X), new(*X)), NOTHING, (SHARED, SHARED), "tensor 1 with 0"),
    "memory": (
        writes,
        (new(8), new(8)),
        NOTHING,
        (MEMORY[:8], MEMORY[1:]),
        "memory of the tensor arguments",
    ),
    "value": (net, (new(*X), 2), NOTHING, (new(*X), "2"), "expected args[1] to be 2, got '2'"),
    "key": (
        of_values,
        (new(3), {"by": 2}),
        NOTHING,
        (new(3), {"by": 2, "more": 1}),
        "keys by, more",
    ),
    "item": (of_values, (new(3), {"by": 2}), NOTHING, (new(3), {"by": 3}), "['by'] to be 2, got 3"),
    "count": (net, (new(*X),), NOTHING, (new(*X), 1), "the arguments"),
    "training": (net, (new(*X),), _training, (new(*X),), "drop to be in evaluation mode"),
    "hooks": (net, (new(*X),), _hooked, (new(*X),), "other hooks"),
    "submodules": (
        net,
        (new(*X),),
        lambda: _set(net, "drop", nn.ReLU()),
        (new(*X),),
        "other submodules",
    ),
    "parameter": (
        net,
        (new(*X),),
        lambda: _set(net.layer, "weight", nn.Parameter(new(4, 4))),
        (new(*X),),
        "layer.weight",
    ),
    "type of a parameter": (net, (new(*X),), _double, (new(*X),), "got f64"),
    "buffer": (net, (new(*X),), lambda: _set(net, "mean", new(4)), (new(*X),), "expected mean"),
    "attribute": (net, (new(*X),), lambda: _set(net, "rate", 3.0), (new(*X),), "to be 2.0, got 3"),
    "list": (net, (new(*X),), lambda: _set(net.sizes, 0, 5), (new(*X),), "to be 1, got 5"),
    "global": (of_state, (new(4),), lambda: _global("gain", 3.0), (new(4),), "gain to be 2.0"),
    "dict": (of_state, (new(4),), lambda: _set(table, "scale", 3.0), (new(4),), "to be 2.0, got 3"),
    "inner list": (
        of_state,
        (new(4),),
        lambda: _set(table, "names", ["a"]),
        (new(4),),
        "names",
    ),
    "global tensor": (of_state, (new(4),), lambda: _global("weight", new(4)), (new(4),), "weight"),
    "array": (of_state, (new(4),), lambda: _global("numbers", np.zeros(2)), (new(4),), "numbers"),
    "function": (
        of_objects,
        (new(4),),
        lambda: _global("helper", other_helper),
        (new(4),),
        "helper",
    ),
    "object": (of_objects, (new(4),), lambda: _set(config, "bias", 3.0), (new(4),), "bias"),
    "class attribute": (
        of_objects,
        (new(4),),
        lambda: _set(Config, "factor", 3.0),
        (new(4),),
        "factor",
    ),
    "context variable": (of_context, (new(4),), lambda: _level(3), (new(4),), "level"),
    "environment": (of_environment, (new(4),), _environment, (new(4),), "FXKIT_TEST_FLAG"),
    "closure": (reads_closure, (new(4),), _closure, (new(4),), "inner to be 2.0, got 3.0"),
    "grad mode": (net, (new(*X),), torch.no_grad, (new(*X),), "grad off"),
    "inference": (net, (new(*X),), torch.inference_mode, (new(*X),), "inference mode"),
    "autocast": (
        net,
        (new(*X),),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        (new(*X),),
        "autocast cpu",
    ),
    "default dtype": (net, (new(*X),), _default_dtype, (new(*X),), "default dtype torch.float64"),
    "default device": (
        net,
        (new(*X),),
        lambda: torch.device("meta"),
        (new(*X).cpu(),),
        "default device",
    ),
    "branch": (of_numbers, (new(4),), NOTHING, (new(4) * 99,), "to be False, got True"),
    "number": (of_numbers, (new(4),), NOTHING, (new(4) * 2,), "to be 1.0, got 2.0"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_guard_names_the_users_line(name: str) -> None:
    fn, given, change, args, text = CASES[name]
    net.eval()
    captured = capture(fn, given)
    assert "holds for this call" in captured.explain(*given)
    with change():
        explanation = captured.explain(*args)
    assert text in explanation, explanation
    _check_line(explanation, fn)


def _check_line(explanation: str, fn: Any) -> None:
    """Expect a line of the program that the explanation is about."""
    found = re.search(r"from:  test_explain\.py:(\d+) in (\w+)", explanation)
    assert found is not None, explanation
    target = Net.forward if fn is net else fn
    lines, first = inspect.getsourcelines(target)
    assert int(found[1]) in range(first, first + len(lines)), explanation
    assert found[2] == target.__name__


def test_sizes_that_are_free() -> None:
    captured = capture(of_sizes, (new(4, 4),), dynamic=True)
    explanation = captured.explain(new(9, 4))
    assert "not (x.shape[0] > 6)" in explanation and "x.shape[0] = 9" in explanation
    _check_line(explanation, of_sizes)


def counts(x: torch.Tensor, n: int) -> torch.Tensor:
    if n > 5:
        return x
    return x * n


def test_numbers_that_are_free() -> None:
    captured = capture(counts, (new(2), 1))
    captured(new(2), 2)
    explanation = captured.explain(new(2), 9)
    assert "args[1] > 5 to be False, got True" in explanation
    _check_line(explanation, counts)


def keeps(x: torch.Tensor) -> torch.Tensor:
    config.bias = x + config.bias  # type: ignore[assignment]
    return x * 2


def test_tensors_that_the_program_replaces() -> None:
    with _set(config, "bias", new(2)):
        captured = capture(keeps, (new(2),))
        captured(new(2))
        captured(new(2))
        config.bias = new(3)  # type: ignore[assignment]
        explanation = captured.explain(new(2))
    assert "bias" in explanation and "got f32[3]" in explanation
    _check_line(explanation, keeps)


def ranges(x: torch.Tensor, n: Any) -> torch.Tensor:
    return x * len(range(n))


def shapes(x: torch.Tensor) -> torch.Tensor:
    return x * len(range(x.shape[0]))


@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize(
    ("fn", "calls", "what"),
    [
        (ranges, [(torch.ones(2), n) for n in range(1, 14)], r"args\[1\] keeps changing"),
        (shapes, [(torch.ones(n),) for n in range(2, 15)], "keeps changing"),
    ],
)
def test_recaptures_warn_once_and_say_what_changes(
    fn: Callable[..., Any], calls: list[Any], what: str, dynamic: Any
) -> None:
    captured = Captured(fn, dynamic=dynamic)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for args in calls:
            assert torch.equal(captured(*args), fn(*args))
    texts = [str(it.message) for it in caught if it.category is RecaptureWarning]
    assert len(texts) == 1
    assert re.search(what, texts[0]) and f"in {fn.__name__}" in texts[0]
    assert f"more than {MAX_GRAPHS} times" in texts[0]
