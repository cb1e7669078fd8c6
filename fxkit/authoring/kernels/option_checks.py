"""What `fxkit.kernel` is given, checked before anything is read, built or run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fxkit.authoring.kernels.arguments import WORKSPACE, KernelArguments
from fxkit.authoring.kernels.signature import DTYPES
from fxkit.errors import UnsupportedError


def check_options(
    captures: Sequence[str],
    *,
    texts: Mapping[str, Any],
    functions: Mapping[str, Any],
    numbers: Any,
    workspace: Any,
    dtypes: Any,
    samples: Any,
    flags: Any,
    devices: Any,
) -> None:
    """Refuse options that are not what they have to be.

    Args:
        captures: The pattern's parameters.
        texts: Those that are paths or texts, by name; None where they are left out.
        functions: Those that are functions, likewise.
        numbers: As `fxkit.kernel` is given them, and so the others.
        workspace: Likewise.
        dtypes: Likewise.
        samples: Likewise.
        flags: Likewise.
        devices: Likewise.

    Raises:
        UnsupportedError: With the option, what it has to be, and what it is.
    """
    for name, value in texts.items():
        if value is not None and not isinstance(value, (str, Path)):
            raise _refused(f"{name}= to be a text or a path", value, "pass text, or leave it out")
    for name, value in functions.items():
        if type(value).__module__.partition(".")[0] == "triton":
            hint = f"{name}=lambda x: launch(x), which makes the result and calls kernel[grid](...)"
            raise _refused(f"{name}= to be a function that launches on a grid", value, hint)
        if value is not None and not callable(value):
            raise _refused(f"{name}= to be a function", value, "pass a function, or leave it out")
    if not isinstance(numbers, Mapping) or not all(map(callable, numbers.values())):
        hint = 'numbers={"rows": lambda x: x.shape[0]}'
        raise _refused("numbers= to give a function for each name", numbers, hint)
    if not callable(workspace) and (type(workspace) is not int or workspace < 0):
        hint = "workspace=lambda x: 4 * x.shape[0]"
        raise _refused("workspace= to be bytes, or a function that returns them", workspace, hint)
    if isinstance(flags, str) or not all(isinstance(flag, str) for flag in flags):
        raise _refused("flags= to be several texts", flags, 'flags=("-O3",)')
    if isinstance(devices, str) or not set(devices) <= {"cpu", "cuda"} or not devices:
        raise _refused("devices= to list kinds of devices", devices, 'devices=("cuda",)')
    _check_dtypes(dtypes)
    _check_samples(samples, captures)


def _check_dtypes(dtypes: Any) -> None:
    known = set(DTYPES.values())
    is_listed = isinstance(dtypes, (list, tuple)) and len(dtypes) > 0
    if not is_listed or not all(isinstance(d, torch.dtype) and d in known for d in dtypes):
        hint = f"there are {', '.join(sorted(str(d).removeprefix('torch.') for d in known))}"
        raise _refused("dtypes= to list dtypes of torch that have a type in C++", dtypes, hint)


def _check_samples(samples: Any, captures: Sequence[str]) -> None:
    hint = f'samples=[{{"{captures[0] if captures else "x"}": (3, 4)}}]'
    if isinstance(samples, Mapping) or not all(isinstance(s, Mapping) for s in samples):
        raise _refused("samples= to list mappings of parameters to shapes", samples, hint)
    unknown = sorted({str(name) for sample in samples for name in sample} - set(captures))
    if unknown:
        raise UnsupportedError(
            f"expected samples for {', '.join(captures)}, got some for {', '.join(unknown)}",
            hint=hint,
        )


def check_computed(
    arguments: KernelArguments, numbers: Mapping[str, Any], workspace: Any, place: str
) -> None:
    """Refuse functions of numbers and workspace that no parameter takes, or that know others.

    Raises:
        UnsupportedError: With the name, and the line of the function.
    """
    where = f"{place}:{arguments.signature.line} in {arguments.signature.name}"
    taken = {a.of for a in arguments.of if a.kind == "computed"}
    unused = [name for name in numbers if name not in taken]
    if unused:
        raise UnsupportedError(
            f"expected parameters for numbers= {', '.join(numbers)}, got none named "
            f"{', '.join(unused)}",
            source=where,
            hint=f"add int64_t {unused[0]} to the function, or leave it out of numbers=",
        )
    if workspace and not arguments.has_workspace:
        raise UnsupportedError(
            "expected a parameter that takes the workspace, got none",
            source=where,
            hint=f"add char* {WORKSPACE} to the function, or leave out workspace=",
        )
    known = (*arguments.operands, *arguments.numbers, *arguments.results)
    computing = {**numbers, **({WORKSPACE: workspace} if callable(workspace) else {})}
    for name, function in computing.items():
        code = getattr(function, "__code__", None)
        wanted = () if code is None else code.co_varnames[: code.co_argcount]
        unknown = [n for n in wanted if n not in known]
        if unknown or code is None:
            raise UnsupportedError(
                f"expected a function of {', '.join(known)} for {name}, got "
                f"{'one of ' + ', '.join(unknown) if unknown else repr(function)}",
                source=where,
                hint="its parameters have the names of the operands, numbers and results",
            )


def _refused(expected: str, got: Any, hint: str) -> UnsupportedError:
    return UnsupportedError(f"expected {expected}, got {got!r}", hint=hint)


def check_operands(
    captures: Sequence[tuple[str, type]],
    places: Mapping[str, str],
    arguments: Mapping[str, KernelArguments],
) -> None:
    """Refuse a kernel that takes numbers alone: nothing tells where it runs.

    Args:
        captures: The pattern's parameters, each with its kind.
        places: Kind of device → what messages call its source.
        arguments: Kind of device → what the parameters of its function are given.
    """
    if any(kind is torch.Tensor for _, kind in captures):
        return
    of = {d: a.signature for d, a in arguments.items()}
    told = [f"{places[d]}:{signature.line} in {signature.name}" for d, signature in of.items()]
    raise UnsupportedError(
        "expected an operand that is a tensor, got "
        f"{', '.join(name for name, _ in captures) or 'none'} as numbers",
        source=told[0] if told else None,
        hint="a function takes a tensor by a pointer: const float* x",
    )
