"""Samples of what an operator of one's own takes, and its entry in torch's table of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxkit.authoring.operators.composed import reference
from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.evaluation import kind_of_dtype
from fxkit.torch_adapters import opinfos
from fxkit.torch_adapters.opinfos import Sample

_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
)  # fmt: skip

# For each sample the shapes of operands, in turn, and of the rows of operators on rows.
_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((), ()),
    ((5,), (5,)),
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((3, 1), (1, 4)),
    ((2, 3, 4), ()),
    ((0, 3), (0, 3)),
)
_ROWS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((5,), (5,)),
    ((3, 7), (3, 7)),
    ((3, 7), (7,)),
    ((2, 3, 5), (3, 5)),
    ((3, 1), (3, 1)),
    ((0, 3), (0, 3)),
)


def dtypes_of_operands(definition: Definition) -> list[torch.dtype]:
    """Return the dtypes that all operands may have."""
    found: list[torch.dtype] = []
    for dtype in _DTYPES:
        kind = kind_of_dtype(dtype)
        try:
            definition.kinds(dict.fromkeys(definition.tensors, kind), definition.numbers)
        except TypeError:  # floats have no bits
            continue
        found.append(dtype)
    return found


def samples(
    definition: Definition,
    device: torch.device | str,
    dtype: torch.dtype,
    requires_grad: bool,
    low: float,
    high: float,
) -> Iterator[Sample]:
    """Yield samples: scalars, broadcasting, empty and strided operands, other numbers."""

    def tensor(shape: tuple[int, ...], is_strided: bool = False) -> torch.Tensor:
        made = _random(shape, dtype, device, low, high)
        made = made.repeat_interleave(2, -1)[..., ::2] if is_strided and shape else made
        return made.requires_grad_(requires_grad and dtype.is_floating_point)

    def operands(shapes: tuple[tuple[int, ...], ...], **options: Any) -> tuple[Any, ...]:
        pairs = enumerate(definition.tensors)
        of = [(name, shapes[min(place, len(shapes) - 1)]) for place, name in pairs]
        return tuple(tensor(_shape(definition, name, s), **options) for name, s in of)

    def call(values: tuple[Any, ...], numbers: dict[str, Any]) -> Sample:
        named = dict(zip(definition.tensors, values, strict=True))
        positional = [p for p in definition.parameters if p.is_tensor and not p.is_keyword_only]
        is_first = [p.is_tensor for p in definition.parameters[: len(positional)]]
        args = [named.pop(p.name) for p in positional[: len(is_first) if all(is_first) else 1]]
        return Sample(tuple(args), {**named, **numbers})

    every = _SHAPES if definition.rows is None else _ROWS
    for shapes in every:
        yield call(operands(shapes), {})
    yield call(operands(every[2], is_strided=True), {})
    if definition.numbers:
        yield call(operands(every[2]), {n: _another(v) for n, v in definition.numbers.items()})


def _shape(definition: Definition, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    is_single = definition.rows is not None and name not in definition.rows
    return shape[:-1] if is_single else shape


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, low: float, high: float
) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape, device=device) < 0.5
    if not dtype.is_floating_point:
        low = max(low, 0) if dtype is torch.uint8 else low
        return torch.randint(int(low), int(high) + 1, shape, dtype=dtype, device=device)
    return (torch.rand(shape, dtype=torch.float64, device=device) * (high - low) + low).to(dtype)


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value * 1.5 if isinstance(value, float) else value + 1


def opinfo_of(definition: Definition, operator: Callable[..., Any], low: float, high: float) -> Any:
    """Return an operator's entry in torch's table; see `ElementwiseOperator.opinfo`."""
    names = [p.name for p in definition.parameters]

    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        given = {**definition.numbers, **dict(zip(names, args, strict=False)), **kwargs}
        tensors = [torch.as_tensor(given[name]) for name in definition.tensors]
        numbers = {name: given[name] for name in definition.numbers}
        found = tuple(each.numpy() for each in reference(definition, tensors, numbers))
        return found if definition.is_tuple else found[0]

    def sampled(device: Any, dtype: torch.dtype, requires_grad: bool) -> Iterator[Sample]:
        return samples(definition, device, dtype, requires_grad, low, high)

    dtypes = dtypes_of_operands(definition)
    return opinfos.opinfo(definition.name, operator, of_arrays, dtypes, sampled)
