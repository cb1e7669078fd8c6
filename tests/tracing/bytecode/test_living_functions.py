"""Programs are captured as before where theirs and the interpreter's objects are frozen."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fxkit
from fxkit.tracing.bytecode.living_functions import functions_of

pytestmark = pytest.mark.core

Program = Callable[[torch.Tensor], Any]

LOG = logging.getLogger(__name__)


class Kept:
    """Keeps programs where they are found by way of an object, and not by name."""

    def __init__(self) -> None:
        self.table = {"by": [_with_default(factor) for factor in (2.0, 3.0)]}

    @property
    def first(self) -> Program:
        return self.table["by"][0]


def _with_default(factor: float) -> Program:
    def scale(x: torch.Tensor, by: float = factor) -> torch.Tensor:
        return x * by * random.choice([1.0])

    return scale


def _announced(fn: Program) -> Program:
    @functools.wraps(fn)
    def call(x: torch.Tensor) -> Any:
        LOG.debug("called")
        return fn(x)

    return call


def _chosen(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def _mapped(x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row.sin() * 2)(x)


@_announced
def _wrapped(x: torch.Tensor) -> torch.Tensor:
    return x + len(os.environ.get("NEVER", ""))


def _drawn(x: torch.Tensor) -> torch.Tensor:
    return x * random.Random(3).random()


KEPT = Kept()


def _by_property(x: torch.Tensor) -> torch.Tensor:
    return KEPT.first(x)


PROGRAMS: tuple[Program, ...] = (_chosen, _mapped, _wrapped, _drawn, _by_property, KEPT.first)


@pytest.fixture
def all_frozen() -> Iterator[None]:
    """Freeze all that was made, as servers do before they fork."""
    gc.freeze()
    yield
    gc.unfreeze()


def _outcome(program: Program) -> str:
    x = torch.ones(2, 3)
    try:
        captured = fxkit.capture(program, (x,))
    except fxkit.errors.CaptureError as error:
        return str(error)
    assert torch.equal(captured(-x), program(-x))
    return f"{len(captured.nodes)} nodes"


@pytest.mark.usefixtures("all_frozen")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda it: it.__qualname__.split(".")[-1])
def test_frozen_programs_are_captured_as_others(program: Program) -> None:
    frozen = _outcome(program)
    gc.unfreeze()
    assert frozen == _outcome(program)


@pytest.mark.usefixtures("all_frozen")
def test_frozen_functions_are_all_found() -> None:
    [code] = {one.__code__ for one in KEPT.table["by"]}
    alive = _with_default(4.0)
    assert set(functions_of([code])) == {*KEPT.table["by"], alive}
