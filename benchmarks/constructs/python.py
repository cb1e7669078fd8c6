"""Constructs of the language, and what programs do beside torch."""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import itertools
import logging
import math
import random
import tempfile
import time
import warnings
from collections import namedtuple
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.constructs.case import Case, construct, x

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: Any = None


class Kind(enum.Enum):
    MEAN = "mean"
    SUM = "sum"


@construct
def keywords_and_stars() -> Case:
    def inner(*parts: Any, scale: float = 1.0, **rest: Any) -> Any:
        return sum(parts) * scale + sum(rest.values())

    def fn(a: Any, scale: float) -> Any:
        return inner(a, a + 1, scale=scale, extra=a.sum())

    return Case(fn, lambda: (x(), 2.0), lambda: (x(), 3.0))


@construct
def dataclass_output() -> Case:
    def fn(a: Any, target: Any = None) -> Any:
        loss = None if target is None else (a - target).square().mean()
        return Output(a.softmax(-1), loss)

    return Case(fn, lambda: (x(),), lambda: (x(), x() + 1))


@construct
def dict_and_namedtuple_output() -> Case:
    def fn(a: Any) -> Any:
        return {"pair": Pair(a, a + 1), "shape": tuple(a.shape), "list": [a.sum(), None, "text"]}

    return Case(fn, lambda: (x(),), lambda: (x(2, 2),))


@construct
def enum_argument() -> Case:
    def fn(a: Any, kind: Kind) -> Any:
        return a.mean() if kind is Kind.MEAN else a.sum()

    return Case(fn, lambda: (x(), Kind.MEAN), lambda: (x(), Kind.SUM))


@construct
def generator_of_blocks() -> Case:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def states(a: Any) -> Any:
        for layer in layers:
            a = layer(a).relu()
            yield a

    return Case(lambda a: torch.stack(list(states(a))), lambda: (x(),), lambda: (x(2, 4),))


@construct
def comprehensions() -> Case:
    def fn(a: Any) -> Any:
        rows = [row * i for i, row in enumerate(a) if i % 2 == 0]
        return {i: row.sum() for i, row in enumerate(rows)}, sum(r.mean() for r in rows)

    return Case(fn, lambda: (x(3, 4),), lambda: (x(5, 4),))


@construct
def lambda_and_map() -> Case:
    def fn(parts: Any) -> Any:
        return torch.cat(list(map(_double, sorted(parts, key=lambda p: p.shape[0]))))

    return Case(fn, lambda: ([x(3), x(1)],), lambda: ([x(1), x(2), x(3)],))


def _double(a: Any) -> Any:
    return a * 2


@construct
def nested_function_with_nonlocal() -> Case:
    def fn(a: Any) -> Any:
        total = 0

        def add(b: Any) -> None:
            nonlocal total
            total = total + b

        for row in a:
            add(row)
        return total

    return Case(fn, lambda: (x(3, 4),), lambda: (x(2, 4),))


@construct
def arithmetic_of_shapes() -> Case:
    def fn(a: Any) -> Any:
        scale = 1 / math.sqrt(a.shape[-1])
        return (a @ a.transpose(-1, -2)) * scale

    return Case(fn, lambda: (x(3, 4),), lambda: (x(3, 9),))


@construct
def unpack_and_star() -> Case:
    def fn(a: Any) -> Any:
        first, *middle, last = a.unbind(0)
        return first + last, torch.stack(middle)

    return Case(fn, lambda: (x(4, 2),), lambda: (x(5, 2),))


@construct
def itertools_pairs() -> Case:
    def fn(parts: Any) -> Any:
        return [p * q for p, q in itertools.combinations(parts, 2)]

    return Case(fn, lambda: ([x(2), x(2)],), lambda: ([x(2), x(2), x(2)],))


@construct
def print_of_a_text() -> Case:
    def fn(a: Any) -> Any:
        print("forward", a.shape[0])
        return a + 1

    return Case(fn, lambda: (x(3, 4),), lambda: (x(2, 4),))


@construct
def print_of_a_value() -> Case:
    def fn(a: Any) -> Any:
        b = a * 2
        print(f"mean {b.mean():.3f}")
        return b

    return Case(fn, lambda: (x(),), lambda: (x() + 1,))


@construct
def nested_helper_that_prints() -> Case:
    class Block(nn.Module):
        def forward(self, a: Any) -> Any:
            return _note(a.relu(), "block")

    return Case(nn.Sequential(Block(), Block()), lambda: (x(),), lambda: (x(2, 4),))


def _note(a: Any, name: str) -> Any:
    print(name, tuple(a.shape))
    return a


@construct
def logging_to_a_stream() -> Case:
    stream = io.StringIO()
    logger = logging.Logger("construct")
    logger.addHandler(logging.StreamHandler(stream))

    def fn(a: Any) -> Any:
        logger.warning("shape %s", tuple(a.shape))
        logger.debug("not shown")
        return a.relu()

    def change(kind: str) -> None:
        logger.setLevel(logging.WARNING if kind == "A" else logging.ERROR)

    return Case(fn, lambda: (x(),), change=change, state=stream.getvalue)


@construct
def warning_once() -> Case:
    def fn(a: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("a remark", stacklevel=2)
        return a + 1

    return Case(fn, lambda: (x(),))


@construct
def numpy_in_the_middle() -> Case:
    def fn(a: Any) -> Any:
        return a * torch.from_numpy(np.sort(a.detach().numpy(), axis=-1))

    return Case(fn, lambda: (x(),), lambda: (-x(),))


@construct
def numpy_argument() -> Case:
    return Case(
        lambda a, table: a * float(table.sum()),
        lambda: (x(), np.array([1.0, 2.0])),
        lambda: (x(), np.array([1.0, 5.0])),
    )


@construct
def random_of_python() -> Case:
    return Case(lambda a: a * random.random(), lambda: (x(),))


@construct
def random_of_numpy() -> Case:
    return Case(lambda a: a * np.random.rand(), lambda: (x(),))


@construct
def random_of_torch() -> Case:
    return Case(lambda a: a + torch.randn(4) * torch.rand(1), lambda: (x(),))


@construct
def seed_inside() -> Case:
    def fn(a: Any) -> Any:
        torch.manual_seed(3)
        return a + torch.randn(4)

    return Case(fn, lambda: (x(),))


@construct
def clock() -> Case:
    ticks = itertools.count()

    def fn(a: Any) -> Any:
        start = time.perf_counter()
        b = a * 2
        next(ticks)
        return b if time.perf_counter() >= start else a

    return Case(fn, lambda: (x(),), state=lambda: repr(ticks))


@construct
def text_of_a_shape() -> Case:
    names = {"(3, 4)": 1.0, "(2, 4)": 5.0}
    return Case(lambda a: a * names[str(tuple(a.shape))], lambda: (x(3, 4),), lambda: (x(2, 4),))


@construct
def call_through_a_registry() -> Case:
    registry = {"relu": torch.relu, "double": lambda a: a * 2}
    return Case(lambda a, name: registry[name](a), lambda: (x(), "relu"), lambda: (x(), "double"))


@construct
def operator_overloading() -> Case:
    class Wave:
        def __init__(self, value: Any) -> None:
            self.value = value

        def __add__(self, other: Any) -> Any:
            return Wave(self.value.sin() + other.value.cos())

    def fn(a: Any) -> Any:
        return (Wave(a) + Wave(a * 2)).value

    return Case(fn, lambda: (x(),), lambda: (x(2, 4),))


@construct
def method_resolution() -> Case:
    class Base(nn.Module):
        def block(self, a: Any) -> Any:
            return a + 1

        def forward(self, a: Any) -> Any:
            return self.block(a) * 2

    class Child(Base):
        def block(self, a: Any) -> Any:
            return super().block(a).relu()

    return Case(Child(), lambda: (x(),), lambda: (x(2, 4),))


@functools.cache
def _scale_file() -> Any:
    """Return one file for all runs: its finaliser must not run while something is recorded."""
    return tempfile.NamedTemporaryFile("w+")


@construct
def file_that_is_read() -> Case:
    file = _scale_file()

    def fn(a: Any) -> Any:
        with open(file.name) as opened:
            return a * float(opened.read())

    def change(kind: str) -> None:
        file.seek(0)
        file.write("2.0" if kind == "A" else "3.0")
        file.flush()

    return Case(fn, lambda: (x(),), change=change)
