"""The C function that calls a user's function: one array of pointers, as all kernels are called.

The pointers are those to the memory of operands, results and workspace, then that to the numbers:
one of 64 bits for each parameter that is no pointer to memory, then all lists. Where a parameter is
a list, its number says where that begins.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxkit.authoring.kernels.arguments import KernelArgument, KernelArguments
from fxkit.authoring.kernels.epilogue import AS_IT_IS, FUNCTION, Epilogue, text_of
from fxkit.authoring.kernels.signature import element_type

ENTRY = "fx_authored"
_MEMORY = ("operand", "result", "workspace")
_ELSEWHERE = (*_MEMORY, "threads", "stream", "epilogue")


def entry_name(dtype: torch.dtype | None) -> str:
    """Return the name of the function for a dtype of the type parameter, or for none."""
    return ENTRY if dtype is None else f"{ENTRY}_{str(dtype).removeprefix('torch.')}"


def print_wrapper(
    arguments: KernelArguments,
    dtypes: Sequence[torch.dtype | None],
    *,
    is_cuda: bool = False,
    pointer: str | None = None,
    epilogue: Epilogue | None = None,
) -> str:
    """Return the functions that call a user's function, one for each dtype.

    Args:
        arguments: What the function's parameters are given.
        dtypes: What its type parameter may be; None alone where it has none.
        is_cuda: Whether it is CUDA.
        pointer: A pointer to the function, which may be null; called by its name when left out.
        epilogue: What is done with each element; nothing when left out.
    """
    given = _given_to_hook(arguments, epilogue)
    functions = [_function(arguments, dtype, is_cuda, pointer, given) for dtype in dtypes]
    return "\n".join([text_of(epilogue), *functions] if arguments.has_hook else functions)


def _given_to_hook(arguments: KernelArguments, epilogue: Epilogue | None) -> str:
    """Return the text of the function object that a hook is given."""
    if epilogue is None:
        return f"{AS_IT_IS}{{}}"
    places = memory_places(arguments)
    read = zip(arguments.behind, epilogue.element_types, strict=True)
    pointers = [f"(const {type_}*)fx_buffers[{places[name]}]" for name, type_ in read]
    return f"{FUNCTION}{{{', '.join(pointers)}}}"


def _function(
    arguments: KernelArguments,
    dtype: torch.dtype | None,
    is_cuda: bool,
    pointer: str | None,
    given: str,
) -> str:
    signature = arguments.signature
    element = None if dtype is None else element_type(dtype, is_cuda)
    name = signature.name if element is None else f"{signature.name}<{element}>"
    places = memory_places(arguments)
    slots = {a.parameter.name: i for i, a in enumerate(told_by_numbers(arguments))}
    values = [
        given if a.kind == "epilogue" else _value(a, places, slots, element, signature.template)
        for a in arguments.of
    ]
    call = f"{pointer or name}({', '.join(values)})"
    body = f"{call};\n    return 0;" if signature.returns == "void" else f"return {call};"
    return (
        f'extern "C" long {entry_name(dtype)}(void* const* fx_buffers, long fx_threads) {{\n'
        f"  const long* fx_numbers = (const long*)fx_buffers[{len(places)}];\n"
        f"  (void)fx_numbers, (void)fx_threads;\n"
        + (f"  if (!{pointer}) return -1;\n" if pointer else "")
        + f"  try {{\n    {body}\n  }} catch (...) {{\n    return 1;\n  }}\n}}\n"
    )


def _value(
    argument: KernelArgument,
    places: Mapping[str, int],
    slots: Mapping[str, int],
    element: str | None,
    template: str | None,
) -> str:
    parameter = argument.parameter
    type_ = element if template is not None and parameter.type == template else parameter.type
    const = "const " if parameter.is_const else ""
    if argument.kind in _MEMORY:
        return f"({const}{type_}*)fx_buffers[{places[argument.of]}]"
    if argument.kind == "threads":
        return f"({type_})fx_threads"
    if argument.kind == "stream":
        return f"({type_})fx_buffers[{len(places) + 1}]"
    slot = slots[parameter.name]
    if parameter.is_list:
        return f"({const}{type_}*)(fx_numbers + fx_numbers[{slot}])"
    if is_real(argument):
        return f"({type_})*(const double*)(fx_numbers + {slot})"
    return f"({type_})fx_numbers[{slot}]"


def is_real(argument: KernelArgument) -> bool:
    """Tell whether a number is passed as a double, and not as an integer."""
    return not argument.parameter.is_integer and argument.parameter.type != "bool"


def memory_places(arguments: KernelArguments) -> dict[str, int]:
    """Return the position of each tensor, and of the workspace, among the pointers."""
    names = [*arguments.operands, *arguments.results]
    if arguments.has_workspace:
        names.append("workspace")
    return {name: place for place, name in enumerate(names)}


def told_by_numbers(arguments: KernelArguments) -> list[KernelArgument]:
    """Return what is given among the numbers, in order."""
    return [a for a in arguments.of if a.kind not in _ELSEWHERE]


def pack_numbers(
    arguments: KernelArguments, tensors: Mapping[str, Any], numbers: Mapping[str, float | int]
) -> bytes:
    """Return the numbers of a call.

    Args:
        arguments: What the function's parameters are given.
        tensors: The operands and results, or anything with their `shape` and `stride()`.
        numbers: The numbers of the pattern, and those that the user computes.
    """
    told = told_by_numbers(arguments)
    head, lists = [], []
    for argument in told:
        if argument.kind in ("number", "computed"):
            head.append(_packed(argument, numbers[argument.of]))
            continue
        value = _of_tensor(argument, tensors[argument.of])
        if isinstance(value, tuple):
            head.append(struct.pack("=q", len(told) + len(lists)))
            lists.extend(value)
        else:
            head.append(struct.pack("=q", value))
    return b"".join(head) + struct.pack(f"={len(lists)}q", *lists)


def _packed(argument: KernelArgument, value: float | int) -> bytes:
    return struct.pack("=d", float(value)) if is_real(argument) else struct.pack("=q", int(value))


def _of_tensor(argument: KernelArgument, tensor: Any) -> int | tuple[int, ...]:
    kind = argument.kind
    if kind == "numel":
        return tensor.numel()
    if kind == "rank":
        return len(tensor.shape)
    values = tuple(tensor.shape if kind in ("sizes", "size") else tensor.stride())
    if kind in ("sizes", "strides"):
        return values
    axis = argument.axis
    if not -len(values) <= axis < len(values):
        return 1 if kind == "size" else 0
    return values[axis]
