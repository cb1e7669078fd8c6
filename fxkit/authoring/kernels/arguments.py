"""What each parameter of a kernel's function is given, by its name and type.

x, out              memory of an operand or a result
x_sizes, x_strides  its sizes or strides, one for each axis: const int64_t*
x_size_0            one of them; x_size_last, x_stride_last for the last axis
x_numel, x_rank     the number of its elements, of its axes
k                   a number that the pattern binds
rows                what numbers={"rows": ...} computes
workspace           memory of as many bytes as workspace= says
threads, stream     the number of threads; the stream of CUDA
epilogue            what is done with each element before it is stored: auto
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxkit.authoring.kernels.signature import DTYPES, STREAM, KernelParameter, KernelSignature
from fxkit.errors import UnsupportedError

WORKSPACE = "workspace"
_OF_TENSOR = re.compile(
    r"(?P<of>\w+?)_(?P<what>sizes|strides|rank|numel|(?:size|stride)_(?:\d+|last))"
)


@dataclass(frozen=True)
class KernelArgument:
    """What one parameter is given.

    Attributes:
        parameter: The parameter.
        kind: `operand`, `result`, `workspace`, `sizes`, `strides`, `rank`, `numel`, `size`,
            `stride`, `number`, `computed`, `threads`, `stream` or `epilogue`.
        of: The tensor or number that it is of.
        axis: Which axis, for `size` and `stride`.
    """

    parameter: KernelParameter
    kind: str
    of: str = ""
    axis: int = 0


@dataclass(frozen=True)
class KernelArguments:
    """What the parameters of a function are given, all of them.

    Attributes:
        signature: The function's.
        of: For each parameter what it is given.
        operands: The captures that are tensors, in the order of the pattern.
        numbers: The captures that are numbers.
        results: Names of the results, in the order of the pattern.
        behind: Names of operands that the epilogue reads, and the function is not given.
    """

    signature: KernelSignature
    of: tuple[KernelArgument, ...]
    operands: tuple[str, ...]
    numbers: tuple[str, ...]
    results: tuple[str, ...]
    behind: tuple[str, ...] = ()

    def takes_strides(self, name: str) -> bool:
        """Tell whether the function is told the strides of a tensor, or was made for them."""
        if name in self.behind:
            return True
        return any(a.of == name and a.kind in ("strides", "stride") for a in self.of)

    def parameter(self, name: str) -> KernelParameter | None:
        """Return the parameter that is a tensor's memory."""
        kinds = ("operand", "result")
        return next((a.parameter for a in self.of if a.of == name and a.kind in kinds), None)

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor; None where any will do, or the type parameter says it."""
        parameter = self.parameter(name)
        return None if parameter is None else DTYPES.get(parameter.type)

    def is_generic(self, name: str) -> bool:
        """Tell whether the elements of a tensor are of the function's type parameter."""
        parameter, template = self.parameter(name), self.signature.template
        return parameter is not None and template is not None and parameter.type == template

    @property
    def has_hook(self) -> bool:
        """Whether the function calls an epilogue."""
        return any(a.kind == "epilogue" for a in self.of)

    @property
    def has_workspace(self) -> bool:
        """Whether the function takes workspace."""
        return any(a.kind == "workspace" for a in self.of)

    def kind_of(self, number: str) -> type:
        """Return what a number of the pattern is: bool, int or float."""
        parameter = next(a.parameter for a in self.of if a.kind == "number" and a.of == number)
        if parameter.type == "bool":
            return bool
        return int if parameter.is_integer else float


def arguments_of(
    signature: KernelSignature,
    captures: Sequence[str],
    results: Sequence[str] | None,
    count: int,
    computed: Mapping[str, Any],
    place: str,
) -> KernelArguments:
    """Return what each parameter of a function is given.

    Args:
        signature: The function's.
        captures: The pattern's parameters.
        results: Names of the results, where the user tells them.
        count: How many results the pattern has.
        computed: Numbers that the user computes, by name.
        place: The file of the function, for messages.

    Raises:
        UnsupportedError: When a parameter is none of what there is, or something is left over.
    """
    where = f"{place}:{signature.line} in {signature.name}"
    named = results or _written(signature, captures)
    if len(named) != count:
        raise UnsupportedError(
            f"expected a pointer for each of the pattern's {count} result(s), got "
            f"{', '.join(named) or 'none'}",
            source=where,
            hint="results are pointers to what is not const, named by results= where the order is "
            "not that of the pattern",
        )
    found = tuple(_argument(p, signature, captures, named, computed, where) for p in
                  signature.parameters)  # fmt: skip
    given = [a.of for a in found if a.kind in ("operand", "result", "number")]
    missing = [n for n in (*captures, *named) if n not in given]
    twice = sorted({n for n in given if given.count(n) > 1})
    if missing or twice:
        told = f"no {', '.join(missing)}" if missing else f"{', '.join(twice)} twice"
        raise UnsupportedError(
            f"expected parameters for {', '.join((*captures, *named))}, got {told}",
            source=where,
            hint="a parameter has the name of the pattern's parameter that it is",
        )
    is_tensor = {a.of for a in found if a.kind == "operand"}
    return KernelArguments(
        signature,
        found,
        tuple(n for n in captures if n in is_tensor),
        tuple(n for n in captures if n not in is_tensor),
        tuple(named),
    )


def _written(signature: KernelSignature, captures: Sequence[str]) -> tuple[str, ...]:
    """Return the pointers that a function may write to, in order."""
    return tuple(
        p.name
        for p in signature.parameters
        if p.is_pointer and not p.is_const and p.name not in (*captures, WORKSPACE)
    )


def _argument(
    parameter: KernelParameter,
    signature: KernelSignature,
    captures: Sequence[str],
    results: Sequence[str],
    computed: Mapping[str, Any],
    where: str,
) -> KernelArgument:
    name = parameter.name
    is_number = parameter.is_integer or parameter.is_real or parameter.type == "bool"
    if signature.template is not None and parameter.type == signature.template:
        is_number = not parameter.is_pointer
    if name in captures and parameter.is_pointer:
        if not parameter.is_const:
            raise UnsupportedError(
                f"expected the operand {name} to be constant, got {parameter}",
                source=where,
                hint=f"write const {parameter}: a kernel leaves its operands as they are",
            )
        _check_elements(parameter, signature, where)
        return KernelArgument(parameter, "operand", name)
    if name in captures and is_number:
        return KernelArgument(parameter, "number", name)
    if name in results and parameter.is_pointer and not parameter.is_const:
        _check_elements(parameter, signature, where)
        return KernelArgument(parameter, "result", name)
    if name == WORKSPACE and parameter.is_pointer:
        return KernelArgument(parameter, "workspace", name)
    if name == "threads" and parameter.is_integer:
        return KernelArgument(parameter, "threads")
    if name == "stream" and parameter.type == STREAM:
        return KernelArgument(parameter, "stream")
    if name == "epilogue" and parameter.type == "auto" and not parameter.is_pointer:
        return KernelArgument(parameter, "epilogue")
    if name in computed and is_number:
        return KernelArgument(parameter, "computed", name)
    found = _OF_TENSOR.fullmatch(name)
    if found is not None and found["of"] in (*captures, *results):
        return _of_tensor(parameter, found["of"], found["what"], where)
    raise UnsupportedError(
        f"expected a parameter that is an operand, a result or about one, got {parameter}",
        source=where,
        hint=f"tensors and numbers are {', '.join((*captures, *results))}; of a tensor there are "
        "_sizes, _strides, _size_0, _stride_0, _size_last, _numel and _rank; there are workspace "
        "and threads; others come from numbers={...}",
    )


def _check_elements(parameter: KernelParameter, signature: KernelSignature, where: str) -> None:
    if parameter.type in DTYPES or parameter.type == signature.template:
        return
    raise UnsupportedError(
        f"expected a pointer to elements of a dtype of torch, got {parameter}",
        source=where,
        hint=f"there are {', '.join(DTYPES)}, and the parameter of a template",
    )


def _of_tensor(parameter: KernelParameter, of: str, what: str, where: str) -> KernelArgument:
    kind, _, axis = what.partition("_")
    fits = parameter.is_list if kind in ("sizes", "strides") else parameter.is_integer
    if not fits:
        wanted = "const int64_t*" if kind in ("sizes", "strides") else "int64_t"
        raise UnsupportedError(
            f"expected {wanted} {parameter.name}, got {parameter}", source=where, hint="see the "
            "table of parameters in fxkit's documentation"
        )  # fmt: skip
    return KernelArgument(parameter, kind, of, -1 if axis == "last" else int(axis or 0))
