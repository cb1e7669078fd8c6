"""Which attributes code asks for by texts, and of which variables it reads them all."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch

import fxkit
from fxkit.tracing.bytecode.code_names import names_in
from fxkit.tracing.environment.findings import Findings

CFG: Any = None
NAME: Any = None


@pytest.mark.parametrize(
    ("fn", "asked"),
    [
        (lambda o: getattr(o, "a"), {"a"}),  # noqa: B009
        (lambda o: getattr(o, "a", 1.0), {"a"}),
        (lambda o: getattr(o.b.c, "a", CFG.d + 1), {"a"}),
        (lambda o: getattr(CFG, "a", CFG[0]), {"a"}),
        (lambda o: getattr(CFG, "a", CFG.f(1)), {"a"}),
        (lambda o: hasattr(o, "a") and hasattr(CFG, "b"), {"a", "b"}),
        (lambda o: setattr(o, "a", NAME), {"a"}),
        (lambda o: delattr(o, "a"), {"a"}),
    ],
)
def test_names_as_texts(fn: Any, asked: set[str]):
    names = names_in(fn.__code__)
    assert names.asked == asked and asked <= names.attributes
    assert not names.is_reflective and not names.reflected


@pytest.mark.parametrize(
    ("fn", "of"),
    [
        (lambda o: getattr(o, NAME), "o"),
        (lambda o: getattr(o, "a" + NAME), "o"),
        (lambda o: getattr(CFG.b, "a" * NAME, 1), "CFG"),
        (lambda o: getattr(CFG, f"a{NAME}"), "CFG"),
        (lambda o: getattr(CFG, "a".lower()), "CFG"),
        (lambda o: vars(CFG), "CFG"),
        (lambda o: dir(o), "o"),
        (lambda o: CFG.b.__dict__, "CFG"),
    ],
)
def test_names_that_are_computed(fn: Any, of: str):
    names = names_in(fn.__code__)
    assert names.is_reflective and of in names.reflected


def test_attributes_that_patterns_name():
    def fn(o: Any) -> Any:
        match o:
            case CFG(first=1, second=found):
                return found

    assert {"first", "second"} <= names_in(fn.__code__).attributes


def test_a_record_of_a_log_does_not_lead_to_all_that_is_imported():
    log = logging.getLogger("tests.tracing.bytecode")

    def fn(x: torch.Tensor) -> torch.Tensor:
        log.warning("%d rows", x.shape[0])
        return x + 1

    held: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        hold = Findings.hold
        patch.setattr(
            Findings,
            "hold",
            lambda findings, holder: (held.append(holder.value), hold(findings, holder)),
        )
        captured = fxkit.capture(fn, (torch.ones(3),))
    assert held
    assert not any(value is sys.modules for value in held)
    assert torch.equal(captured(torch.ones(3)), torch.full((3,), 2.0))
