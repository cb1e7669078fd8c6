"""Named orders of passes, each one list."""

from __future__ import annotations

from fxkit.passes.base import Pass
from fxkit.passes.canonicalise import Canonicalise
from fxkit.passes.common_subexpression_elimination import CommonSubexpressionElimination
from fxkit.passes.constant_folding import ConstantFolding
from fxkit.passes.dead_code_elimination import DeadCodeElimination
from fxkit.passes.fold_batch_norm import FoldBatchNorm
from fxkit.passes.merge_layers import MergeLayers
from fxkit.passes.recompose import Recompose

SIMPLIFY: tuple[Pass, ...] = (
    Canonicalise(),
    Recompose(),
    ConstantFolding(),
    CommonSubexpressionElimination(),
    DeadCodeElimination(),
)
"""What makes a graph smaller while it goes on reading the parameters at each call; buffers are
taken as constants."""

INFERENCE: tuple[Pass, ...] = (
    Canonicalise(),
    Recompose(),
    FoldBatchNorm(),
    MergeLayers(),
    ConstantFolding(),
    CommonSubexpressionElimination(),
    DeadCodeElimination(),
)
"""Everything that makes a graph smaller for inference; parameters and buffers are taken as
constants."""
