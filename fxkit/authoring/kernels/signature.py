"""The signature of a C++ or CUDA function, read from its text: what each parameter is given.

    void scale(const float* x, const float* b, float* out, int64_t out_numel, double factor)

What a parameter is given follows from its name and type: the memory of an operand or a result,
sizes and strides of one, a number of the pattern, workspace, the number of threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fxkit.errors import UnsupportedError

DTYPES: Mapping[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "_Float16": torch.float16,
    "__half": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "__nv_bfloat16": torch.bfloat16,
    "int8_t": torch.int8,
    "signed char": torch.int8,
    "uint8_t": torch.uint8,
    "unsigned char": torch.uint8,
    "int16_t": torch.int16,
    "short": torch.int16,
    "int32_t": torch.int32,
    "int": torch.int32,
    "int64_t": torch.int64,
    "long": torch.int64,
    "long long": torch.int64,
    "bool": torch.bool,
}
"""Types of elements in C++ → dtype."""

_ON_GPU: Mapping[torch.dtype, str] = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}


def element_type(dtype: torch.dtype, is_cuda: bool) -> str:
    """Return the type in C++ of the elements of a dtype."""
    own = _ON_GPU.get(dtype) if is_cuda else None
    return own or next(name for name, known in DTYPES.items() if known == dtype)


_LONG = frozenset({"int64_t", "long", "long long"})
_INTEGERS = frozenset({"int", "int32_t", "size_t", "unsigned", *_LONG})
_REALS = frozenset({"float", "double"})

STREAM = "cudaStream_t"


@dataclass(frozen=True)
class KernelParameter:
    """One parameter of a function.

    Attributes:
        name: Its name.
        type: Its type, or that of what it points to, without `const`.
        is_pointer: Whether it is a pointer.
        is_const: Whether what it points to is constant.
    """

    name: str
    type: str
    is_pointer: bool
    is_const: bool

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer that is passed by value."""
        return not self.is_pointer and self.type in _INTEGERS

    @property
    def is_real(self) -> bool:
        """Whether it is a floating-point number that is passed by value."""
        return not self.is_pointer and self.type in _REALS

    @property
    def is_list(self) -> bool:
        """Whether it points to integers of 64 bits, as sizes and strides are."""
        return self.is_pointer and self.is_const and self.type in _LONG

    def __str__(self) -> str:
        const, star = "const " if self.is_const else "", "*" if self.is_pointer else ""
        return f"{const}{self.type}{star} {self.name}"


@dataclass(frozen=True)
class KernelSignature:
    """A function's name and parameters.

    Attributes:
        name: Its name.
        returns: `void`, or an integer type: then anything but 0 says that it failed.
        parameters: Its parameters.
        template: The name of its type parameter, or None.
        line: Where it stands in the text.
    """

    name: str
    returns: str
    parameters: tuple[KernelParameter, ...]
    template: str | None = None
    line: int = 0

    def __str__(self) -> str:
        return f"{self.returns} {self.name}({', '.join(map(str, self.parameters))})"


_FUNCTION = re.compile(
    r"(?P<static>\bstatic\s+|\binline\s+|__global__\s+|__device__\s+)*"
    r"\b(?P<returns>void|int|long|int64_t)\s+(?P<name>[A-Za-z_]\w*)\s*"
    r"\((?P<parameters>[^(){};]*)\)\s*(?P<end>[{;]|$)"
)
_TEMPLATE = re.compile(r"template\s*<\s*(?:typename|class)\s+(\w+)\s*>\s*(?:extern\s*\"C\"\s*)?$")
_NOT_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)


def read_signature(
    text: str, wished: str | None, others: Iterable[str], place: str, lines_before: int = 0
) -> KernelSignature:
    """Return the signature of the function that a text is about.

    Args:
        text: C++ or CUDA.
        wished: The function's name, where the user tells it.
        others: Names that it may have otherwise; the only function has any name.
        place: What the text is, for messages.
        lines_before: How many lines of the text are not the user's.

    Raises:
        UnsupportedError: When there is no such function, or its parameters are not plain.
    """
    code = _without_comments(text)
    found = [m for m in _FUNCTION.finditer(code) if not _is_inner(code, m)]
    names = list(dict.fromkeys(m["name"] for m in found))
    candidates = [wished] if wished is not None else [n for n in others if n in names]
    name = next((n for n in candidates if n in names), None)
    if name is None and wished is None and len(names) == 1:
        name = names[0]
    if name is None:
        told = f"{wished!r}" if wished else f"one named {' or '.join(map(repr, others))}"
        raise UnsupportedError(
            f"expected a function {told} in {place} that returns void or int, got "
            f"{', '.join(names) or 'none'}",
            hint="write void name(const float* x, float* out, int64_t out_numel), and "
            "function='name' where there are several",
        )
    match = next(m for m in found if m["name"] == name)
    line = code.count("\n", 0, match.start("name")) + 1 - lines_before
    before = _TEMPLATE.search(code[: match.start()].rstrip() + " ".rstrip())
    parameters = tuple(
        _parameter(part, f"{place}:{line}")
        for part in match["parameters"].split(",")
        if part.strip() not in ("", "void")
    )
    return KernelSignature(name, match["returns"], parameters, before[1] if before else None, line)


def _without_comments(text: str) -> str:
    """Return a text with blanks in the place of comments and strings, line by line as it was."""

    def blank(match: re.Match[str]) -> str:
        kept = match[0] if match[0] == '"C"' else ""
        return kept or re.sub(r"[^\n]", " ", match[0])

    return _NOT_CODE.sub(blank, text)


def _is_inner(code: str, match: re.Match[str]) -> bool:
    """Tell whether what looks like a function is none that can be called from outside."""
    if re.match(r"\s*(static|inline|__global__|__device__)\b", match[0]):
        return True
    before = code[: match.start()]
    depth = before.count("{") - before.count("}")
    opened = len(re.findall(r"extern\s*\"C\"\s*\{|namespace\s*\w*\s*\{", before))
    return depth > opened


def _parameter(text: str, place: str) -> KernelParameter:
    words = re.sub(r"\b(__restrict__|__restrict|restrict|std::)", " ", text)
    pointers = words.count("*")
    plain = words.replace("*", " ").split("=")[0].split()
    is_const = "const" in plain
    plain = [word for word in plain if word != "const"]
    if len(plain) < 2 or pointers > 1 or "&" in text or "[" in text:
        raise UnsupportedError(
            f"expected a pointer or a number as a parameter, got {' '.join(text.split())!r}",
            source=place,
            hint="parameters are named, as in const float* x, int64_t x_numel, double factor",
        )
    return KernelParameter(plain[-1], " ".join(plain[:-1]), pointers == 1, is_const)
