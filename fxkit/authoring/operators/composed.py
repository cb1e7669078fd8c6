"""An authored operator as a composition of torch's own operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.dtype_promotion import dtypes_of, result_dtype
from fxkit.authoring.operators.evaluation import (
    Dtypes,
    ScalarEvaluation,
    TorchComputer,
    kind_of_dtype,
)
from fxkit.lower.loop_ir.bits import Number

Results = tuple[torch.Tensor, ...]


def composed(
    definition: Definition, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Number]
) -> Results:
    """Compute an operator by torch, in the dtypes in which its kernels compute.

    Args:
        definition: What it computes.
        tensors: Its operands, which broadcast.
        numbers: Its numeric parameters.
    """
    return _evaluated(definition, tensors, numbers, dtypes_of(tensors))


def reference(
    definition: Definition, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Number]
) -> Results:
    """Compute an operator in float64; floats of results are float64."""
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    dtypes = Dtypes(torch.float64, dtypes_of(tensors).integers)
    return _evaluated(definition, wide, numbers, dtypes)


def _evaluated(
    definition: Definition,
    tensors: Sequence[torch.Tensor],
    numbers: Mapping[str, Number],
    dtypes: Dtypes,
) -> Results:
    device = next((t.device for t in tensors if t.ndim), tensors[0].device)
    operands = {
        name: t.to(dtypes.computed) if t.is_floating_point() else t
        for name, t in zip(definition.tensors, tensors, strict=True)
    }
    evaluation = ScalarEvaluation(TorchComputer(device), dtypes, operands, numbers)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(
        _finished(evaluation.result(result), dtypes, shape, operands.values())
        for result in definition.results
    )


def _finished(
    found: torch.Tensor, dtypes: Dtypes, shape: torch.Size, operands: object
) -> torch.Tensor:
    found = found.to(result_dtype(kind_of_dtype(found.dtype), dtypes))
    if found.shape != shape:  # it does not depend on all operands
        return found.expand(shape).clone()
    return found.clone() if any(found is operand for operand in operands) else found  # type: ignore[attr-defined]
