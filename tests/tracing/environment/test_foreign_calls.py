"""Functions written in C: what is known of them."""

from __future__ import annotations

import linecache
import tokenize
import types
from pathlib import Path

import pytest
import torch

import fxkit
from fxkit.tracing.captured import Captured
from fxkit.tracing.environment.foreign_calls import has_effects, is_known


@pytest.mark.parametrize("given", [types.ModuleType("elsewhere"), None, 3])
def test_functions_whose_module_is_no_text(given: object):
    class Named:
        """Looks like a function of a library that gives the module in place of its name."""

        __name__ = "measure"
        __self__ = types.ModuleType("elsewhere")

        def __init__(self) -> None:
            self.__module__ = given  # type: ignore[assignment]

    assert not is_known(Named())
    assert not has_effects(Named(), None)


def test_lines_of_source_are_looked_up_once_and_files_are_read_again(tmp_path: Path) -> None:
    def looks_up(x: torch.Tensor) -> torch.Tensor:
        linecache.clearcache()
        linecache.getline(__file__, 1)
        return x + 1

    def reads(x: torch.Tensor) -> torch.Tensor:
        with tokenize.open(tmp_path / "source.py") as file:
            return x + len(file.readline())

    x = torch.ones(2)
    captured = fxkit.capture(looks_up, (x,))
    torch.testing.assert_close(captured(x), x + 1)
    assert not any("opaque" in str(node.target) for node in captured.graph_module.graph.nodes)
    captured = Captured(reads)
    for text in ("a = 1", "abc = 1", "abcde = 1"):
        (tmp_path / "source.py").write_text(text)
        torch.testing.assert_close(captured(x), x + len(text))
