"""Opaque calls under torch.compile and AOTAutograd: none lost, none twice, in order."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fxkit
from fxkit.errors import UnsupportedError
from fxkit.tracing.opaque_calls.opaque_operators import as_operators


class _Lines(logging.Handler):
    def __init__(self, lines: list[Any]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_graphs_keep_their_opaque_calls(backend: str):
    seen: list[Any] = []
    logger = logging.Logger("operators")
    logger.addHandler(_Lines(seen))

    @fxkit.opaque
    def note(a: torch.Tensor) -> None:
        seen.append(float(a.sum()))

    @fxkit.opaque
    def double(a: torch.Tensor) -> torch.Tensor:
        seen.append("double")
        return a * 2

    def fn(a: torch.Tensor) -> torch.Tensor:
        note(a)
        b = double(a + 1)
        logger.warning("between")
        note(b)
        return b.relu()

    captured = fxkit.capture(fn, (torch.ones(2),))
    names = [call.name.rpartition(".")[2] for call in captured.opaque_calls]
    assert names == ["note", "double", "warning", "note"]
    torch._dynamo.reset()
    compiled = torch.compile(as_operators(captured.graph_module), backend=backend)
    seen.clear()
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
        assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), 2.0))
    assert seen == [2.0, "double", "between", 8.0, 0.0, "double", "between", 4.0]


def test_numbers_are_no_results_of_operators():
    import random

    captured = fxkit.capture(lambda a: a * random.random(), (torch.ones(2),))
    with pytest.raises(UnsupportedError, match="to give tensors or None"):
        as_operators(captured.graph_module)
