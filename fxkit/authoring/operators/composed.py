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
from fxkit.authoring.operators.row_values import LENGTH
from fxkit.lower.loop_ir.bits import Number

Results = tuple[torch.Tensor, ...]


def composed(
    definition: Definition,
    tensors: Sequence[torch.Tensor],
    numbers: Mapping[str, Number],
    by_core: bool = False,
) -> Results:
    """Compute an operator by torch, in the dtypes in which its kernels compute.

    Args:
        definition: What it computes.
        tensors: Its operands, which broadcast.
        numbers: Its numeric parameters.
        by_core: Whether by core operators alone.
    """
    return _evaluated(definition, tensors, numbers, dtypes_of(tensors), by_core)


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
    by_core: bool = False,
) -> Results:
    device = next((t.device for t in tensors if t.ndim), tensors[0].device)
    tensors = aligned(definition, tensors)
    operands = {
        name: t.to(dtypes.computed) if t.is_floating_point() else t
        for name, t in zip(definition.tensors, tensors, strict=True)
    }
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    if definition.rows is not None:
        numbers = {**numbers, LENGTH: shape[-1]}
        # What is summed along the row has to have all of it.
        for name in definition.rows & operands.keys():
            operands[name] = operands[name].expand(*operands[name].shape[:-1], shape[-1])
    evaluation = ScalarEvaluation(TorchComputer(device, by_core), dtypes, operands, numbers)
    widths = definition.wide or (True,) * len(definition.results)
    return tuple(
        _finished(evaluation.result(result), dtypes, shape, operands.values())
        if is_wide
        else _narrowed(evaluation.result(result), dtypes, shape)
        for result, is_wide in zip(definition.results, widths, strict=True)
    )


def aligned(definition: Definition, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return operands that broadcast: those with one number a row get an axis for it."""
    rows = definition.rows
    if rows is None:
        return list(tensors)
    pairs = zip(definition.tensors, tensors, strict=True)
    return [t if name in rows else t.unsqueeze(-1) for name, t in pairs]


def _narrowed(found: torch.Tensor, dtypes: Dtypes, shape: torch.Size) -> torch.Tensor:
    """Return one number a row, of what has a row of one."""
    found = found.to(result_dtype(kind_of_dtype(found.dtype), dtypes))
    return found.expand(*shape[:-1], 1).squeeze(-1).clone()


def _finished(
    found: torch.Tensor, dtypes: Dtypes, shape: torch.Size, operands: object
) -> torch.Tensor:
    found = found.to(result_dtype(kind_of_dtype(found.dtype), dtypes))
    if found.shape != shape:  # it does not depend on all operands
        return found.expand(shape).clone()
    return found.clone() if any(found is operand for operand in operands) else found  # type: ignore[attr-defined]
