"""The kernel of an authored operator alone, and its row in the table that the fuser reads."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxkit.authoring.operators.composed import aligned
from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.dtype_promotion import dtypes_of, result_dtype
from fxkit.authoring.operators.evaluation import (
    Dtypes,
    KernelComputer,
    ScalarEvaluation,
    kind_of_dtype,
    varied,
)
from fxkit.authoring.operators.primitives import Kind
from fxkit.authoring.operators.result_layout import broadcast_shape, result_strides
from fxkit.authoring.operators.row_values import LENGTH
from fxkit.ir.types import TensorType
from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.loop_ir.builder import Builder, Ref
from fxkit.lower.loop_ir.loop_ir import Access, Buffer, Kernel, Store
from fxkit.lower.operators.scalar_table import Computes, ScalarOp
from fxkit.lower.scheduling.axis_order import ordered

_CPU = torch.device("cpu")

# Where a name in a graph stands for none of these, a parameter may have it.
RESERVED = frozenset({"out", "common_dtype", "result_dtype", "require"})


def row_of_definition(definition: Definition, name: str, tolerance: float) -> ScalarOp:
    """Return the row of an operator: what the fuser knows of it.

    Args:
        definition: What the operator computes.
        name: Its name in graphs.
        tolerance: See `ScalarOp`.
    """
    names, defaults = definition.tensors, definition.numbers

    def build(*operands: Any, common_dtype: torch.dtype, **given: Any) -> Any:
        first = next(operand for operand in operands if isinstance(operand, Ref))
        known = [o.dtype for o in operands if isinstance(o, Ref)]
        whole = [dtype for dtype in known if kind_of_dtype(dtype) is Kind.INTEGER]
        numbers = {name: given.get(name, default) for name, default in defaults.items()}
        values = dict(zip(names, operands, strict=True))
        dtypes = Dtypes.of(common_dtype, whole)
        computer = KernelComputer(first.builder)
        evaluation = ScalarEvaluation(computer, dtypes, values, numbers)
        found = tuple(map(evaluation.result, definition.results))
        return found if definition.is_tuple else found[0]

    attributes = (*defaults, "common_dtype")
    return ScalarOp(name, build, Computes.KINDS, tolerance, (), False, names, attributes)


def result_types(
    definition: Definition, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Number]
) -> list[torch.dtype]:
    """Return the dtype of each result."""
    kinds = {
        name: kind_of_dtype(t.dtype) for name, t in zip(definition.tensors, tensors, strict=True)
    }
    dtypes = dtypes_of(tensors)
    return [result_dtype(kind, dtypes) for kind in definition.kinds(kinds, numbers)]


def results_like(
    definition: Definition, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Number]
) -> list[torch.Tensor]:
    """Return tensors as an operator returns, without its numbers; they may be fake."""
    dtypes = result_types(definition, tensors, numbers)
    whole = aligned(definition, tensors)
    like = functools.reduce(torch.add, whole) if len(whole) > 1 else whole[0]
    widths = definition.wide or (True,) * len(dtypes)
    return [
        torch.empty_like(like, dtype=dtype)
        if is_wide
        else like.new_empty(like.shape[:-1], dtype=dtype)
        for dtype, is_wide in zip(dtypes, widths, strict=True)
    ]


def types_of_results(
    definition: Definition, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Number]
) -> list[TensorType]:
    """Return the types of what an operator makes of tensors in main memory.

    Args:
        definition: What it computes.
        tensors: Its operands.
        numbers: Its numeric parameters.
    """
    whole = aligned(definition, tensors)
    shape = broadcast_shape(whole)
    strides = result_strides(shape, whole)
    dtypes = result_types(definition, tensors, numbers)
    widths = definition.wide or (True,) * len(dtypes)
    single = shape[:-1]
    steps = tuple(math.prod(single[axis + 1 :]) for axis in range(len(single)))
    return [
        TensorType(*((shape, dtype, strides) if is_wide else (single, dtype, steps)), _CPU)
        for dtype, is_wide in zip(dtypes, widths, strict=True)
    ]


def kernel_for(
    definition: Definition,
    tensors: Sequence[torch.Tensor],
    numbers: Mapping[str, Number],
    results: Sequence[TensorType],
) -> Kernel:
    """Return the kernel of an operator for tensors of the types of some.

    Its text reads what is made of numeric parameters at run time.

    Raises:
        Unfusable: When it takes something that kernels do not compute.
    """
    is_of_rows = definition.rows is not None
    dtypes, tensors = dtypes_of(tensors), aligned(definition, tensors)
    builder, sizes = Builder(), broadcast_shape(tensors)
    if is_of_rows:
        numbers = {**numbers, LENGTH: sizes[-1]}
    buffers: list[Buffer] = []
    values: dict[str, Ref] = {}
    for name, tensor in zip(definition.tensors, tensors, strict=True):
        access = Access(len(buffers), _strides(tensor, sizes))
        values[name] = builder.load(access, tensor.dtype)
        buffers.append(Buffer(f"in{len(buffers)}", tensor.dtype, False))
    varying = {name: varied(value, f"given_{name.strip('()')}") for name, value in numbers.items()}
    evaluation = ScalarEvaluation(KernelComputer(builder), dtypes, values, varying)
    stores: list[Store] = []
    for position, (term, known) in enumerate(zip(definition.results, results, strict=True)):
        value = builder.stored(evaluation.result(term), known.dtype)
        strides = tuple(known.stride or ())
        access = Access(len(buffers), strides + (0,) * (len(sizes) - len(strides)))
        buffers.append(Buffer(f"out{position}", known.dtype, True))
        stores.append(Store(access, value.position))
    kernel = Kernel(sizes, 0, tuple(buffers), tuple(builder.body), tuple(stores))
    has_rows = any(i.is_reduction or i.is_scan for i in kernel.body)
    return ordered(kernel, [len(sizes) - 1] if has_rows else [])


def _strides(tensor: torch.Tensor, sizes: tuple[int, ...]) -> tuple[int, ...]:
    lead = len(sizes) - tensor.ndim
    own = zip(tensor.shape, tensor.stride(), strict=True)
    return (0,) * lead + tuple(0 if size == 1 else stride for size, stride in own)
