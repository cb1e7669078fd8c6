"""Named orders of passes, each one list.

`PIPELINES` has them by name; `python -m fxkit passes run NAME model.pt2` runs one on a file.
"""

from __future__ import annotations

from dataclasses import replace

from fxkit.passes.base import Pass
from fxkit.passes.canonicalise import Canonicalise
from fxkit.passes.canonicalise_copies import CanonicaliseCopies
from fxkit.passes.common_subexpression_elimination import CommonSubexpressionElimination
from fxkit.passes.complex_by_parts import ComplexByParts
from fxkit.passes.constant_folding import ConstantFolding
from fxkit.passes.dead_code_elimination import DeadCodeElimination
from fxkit.passes.decompose_float8_casts import DecomposeFloat8Casts
from fxkit.passes.decompose_for_kernels import DecomposeForKernels
from fxkit.passes.decompose_to_aten import DecomposeToAten
from fxkit.passes.fold_batch_norm import FoldBatchNorm
from fxkit.passes.merge_layers import MergeLayers
from fxkit.passes.recompose import Recompose
from fxkit.passes.remove_inference_no_ops import RemoveInferenceNoOps
from fxkit.passes.sink_casts import SinkCasts
from fxkit.passes.sink_transposes import SinkTransposes
from fxkit.passes.type_propagation import TypePropagation

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
    RemoveInferenceNoOps(),
    Recompose(),
    SinkTransposes(),
    SinkCasts(),
    FoldBatchNorm(),
    MergeLayers(),
    ConstantFolding(),
    CommonSubexpressionElimination(),
    DeadCodeElimination(),
)
"""Everything that makes a graph smaller for inference; parameters and buffers are taken as
constants."""

# The library computes the gradients of attention from sums of exponentials that it kept as one
# logarithm. Where scores are large that has not digits enough for their number: of a row whose keys
# are all masked by the least number, gradients would be as many times too large as it has keys.
TRAINING: tuple[Pass, ...] = (
    Canonicalise(),
    Recompose(leave=("attention",)),
    CommonSubexpressionElimination(),
    DeadCodeElimination(),
)
"""What keeps gradients, random numbers and running statistics; no parameter or buffer is taken as a
constant, and attention stays as it is written, whose gradients are more exact."""

# Rules that find work for torch's libraries. What the others find, kernels compute as it is
# written, with the roundings and the infinities of eager.
_LIBRARY_CALLS = ("attention", "convolution", "linear", "softmax_in_float32")


def _as_written(passes: tuple[Pass, ...]) -> tuple[Pass, ...]:
    return tuple(replace(p, only=_LIBRARY_CALLS) if isinstance(p, Recompose) else p for p in passes)


_SIMPLIFY_IN_EVAL = (*SIMPLIFY[:-1], RemoveInferenceNoOps(), *SIMPLIFY[-1:])

LOWERING = (
    DecomposeForKernels(),
    ComplexByParts(),
    *_as_written(_SIMPLIFY_IN_EVAL),
    DecomposeFloat8Casts(),
    CanonicaliseCopies(),
)
"""What `fxkit.compile` runs: `SIMPLIFY`, but of operators that were written out only attention,
convolution and products are put together; what torch computes by other calls is decomposed first,
sizes of complex numbers are computed from their parts, float8 is cast by arithmetic on its bits,
redundant copies are left out, and calls that have to copy, such as a reshape, become
`aten.clone`."""

LOWERING_FAST = (
    DecomposeForKernels(),
    ComplexByParts(),
    *_SIMPLIFY_IN_EVAL,
    DecomposeFloat8Casts(),
    CanonicaliseCopies(),
)
"""The same where results may be nearer to float64 than eager's."""

LOWERING_TRAINING = _as_written(TRAINING)
"""What `fxkit.compile` runs where gradients are asked for: `TRAINING`, but of operators that were
written out only convolution and products are put together."""

QUANTIZATION_READY: tuple[Pass, ...] = (
    Canonicalise(),
    FoldBatchNorm(),
    DecomposeToAten(),
    CommonSubexpressionElimination(),
    DeadCodeElimination(),
)
"""What a quantiser wants to find: no batch norms beside convolutions, every call an overload of
ATen, each value computed once."""

DEBUG: tuple[Pass, ...] = (
    TypePropagation(),
    Canonicalise(),
    DeadCodeElimination(),
)
"""What makes a graph easier to read and keeps every number and every kept node's name."""

PIPELINES: dict[str, tuple[Pass, ...]] = {
    "simplify": SIMPLIFY,
    "inference": INFERENCE,
    "training": TRAINING,
    "lowering": LOWERING,
    "lowering-training": LOWERING_TRAINING,
    "quantization-ready": QUANTIZATION_READY,
    "debug": DEBUG,
}
"""The named orders."""
