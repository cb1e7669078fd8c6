"""Named orders of passes, each one list."""

from __future__ import annotations

from fxkit.passes.base import Pass
from fxkit.passes.canonicalise import Canonicalise
from fxkit.passes.common_subexpression_elimination import CommonSubexpressionElimination
from fxkit.passes.constant_folding import ConstantFolding
from fxkit.passes.dead_code_elimination import DeadCodeElimination
from fxkit.passes.recompose import Recompose

INFERENCE: tuple[Pass, ...] = (
    Canonicalise(),
    Recompose(),
    ConstantFolding(),
    CommonSubexpressionElimination(),
    DeadCodeElimination(),
)
"""Everything that makes a graph smaller for inference; buffers are taken as constants."""
