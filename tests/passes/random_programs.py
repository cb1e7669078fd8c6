"""Random programs through a list of passes: what can be seen of them stays the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import reject
from torch import fx

from fxkit.analysis.tensor_types import propagate_types
from fxkit.errors import InvalidGraphError
from fxkit.ir.printer import format_graph
from fxkit.passes import Pass
from fxkit.passes.manager.manager import PassManager
from tests.patterns.random_graphs import SHAPE, difference, observe


def check_passes_on(gm: fx.GraphModule, passes: Sequence[Pass]) -> None:
    """Run the passes on a program of two inputs; fail when values, writes or sharing differ."""
    args = (torch.empty(SHAPE), torch.empty(SHAPE))
    try:
        expected = observe(gm, transposed=False, same=False)
        propagate_types(gm, args)
    except (RuntimeError, InvalidGraphError):
        reject()
    before = format_graph(gm)
    PassManager(passes, args=args).run(gm)
    differs = difference(expected, observe(gm, transposed=False, same=False))
    assert differs is None, f"{differs}\n{before}\n{format_graph(gm)}"
