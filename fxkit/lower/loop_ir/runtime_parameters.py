"""Numbers that the text of a kernel reads at run time, so that one build serves many sizes.

A kernel's primary numbers are its sizes, strides, offsets and constants. In place of those that are
to be free, a kernel holds a `RuntimeInt` or a `RuntimeFloat`: it has the value that the number has,
and prints as the name under which the text reads it. Arithmetic on free numbers gives free numbers,
which print as the same arithmetic in C++. So a printer needs to know little of them: it decides by
their values, and writes their names. Whatever was decided, a text is right for each kernel that it
was printed for, since the values are those that it is given; when another size leads to other
decisions, that gives another text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from fxkit.lower.loop_ir.bits import Bits
from fxkit.lower.loop_ir.loop_ir import Access, Instruction, Kernel
from fxkit.lower.loop_ir.tensor_op import TensorOp


class RuntimeInt(int):
    """An integer that is known only at run time.

    Args:
        value: What it is now.
        text: The C++ expression, of type long, that gives it: a name, or in parentheses.
    """

    text: str

    def __new__(cls, value: int, text: str) -> RuntimeInt:
        """Make one of a value and its text."""
        made = super().__new__(cls, value)
        made.text = text
        return made

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return self.text

    def __add__(self, other: int) -> RuntimeInt:
        return RuntimeInt(int(self) + int(other), f"({self} + {other})")

    def __radd__(self, other: int) -> RuntimeInt:
        return RuntimeInt(int(other) + int(self), f"({other} + {self})")

    def __sub__(self, other: int) -> RuntimeInt:
        return RuntimeInt(int(self) - int(other), f"({self} - {other})")

    def __mul__(self, other: int) -> RuntimeInt:
        if type(other) is int and other == 1:
            return self
        return RuntimeInt(int(self) * int(other), f"({self} * {other})")

    def __rmul__(self, other: int) -> RuntimeInt:
        return self * other

    def __floordiv__(self, other: int) -> int:
        # C++ rounds towards zero: the same only where nothing is negative.
        if self < 0 or other < 0:
            return int(self) // int(other)
        return RuntimeInt(int(self) // int(other), f"({self} / {other})")


class RuntimeFloat(float):
    """A float64 that is known only at run time; see `RuntimeInt`."""

    text: str

    def __new__(cls, value: float, text: str) -> RuntimeFloat:
        """Make one of a value and its text."""
        made = super().__new__(cls, value)
        made.text = text
        return made


RuntimeValue = RuntimeInt | RuntimeFloat


def is_runtime(value: object) -> bool:
    """Tell whether a number is known only at run time."""
    return isinstance(value, (RuntimeInt, RuntimeFloat))


def ceil_div(value: int, by: int) -> int:
    """Return how many parts of a length it takes to cover another one."""
    return (value + (by - 1)) // by


def split_parameters(kernel: Kernel) -> tuple[Hashable, tuple[int, ...]]:
    """Part a kernel into what it is without its numbers, and its numbers.

    Noughts and ones stay with the kernel, but for constants and where an address begins: an address
    that they are part of has another form. Floats are given by their bits.
    """
    numbers: list[int] = []

    def visit(value: int | float) -> Any:
        numbers.append(bits_of(value))
        return None

    rest, groups = _mapped(kernel, visit)
    return (rest, groups), tuple(numbers)


def parametrised(kernel: Kernel, free: frozenset[int]) -> Kernel:
    """Return a kernel some of whose numbers are read at run time.

    Args:
        kernel: The kernel.
        free: Which of its numbers, by their positions in what `split_parameters` returns.
    """
    position = -1

    def visit(value: int | float) -> Any:
        nonlocal position
        position += 1
        if position not in free:
            return value
        name = f"n{position}"
        return RuntimeFloat(value, name) if isinstance(value, float) else RuntimeInt(value, name)

    return _mapped(kernel, visit)[0]


def fully_parametrised(kernel: Kernel) -> Kernel:
    """Return a kernel all of whose numbers are read at run time."""
    return parametrised(kernel, frozenset(range(len(split_parameters(kernel)[1]))))


def runtime_parameters(kernel: Kernel) -> tuple[RuntimeValue, ...]:
    """Return the numbers that a kernel's text reads at run time, in the order in which they lie."""
    numbers: list[Any] = [*kernel.sizes]
    mapping = _Mapping(_noting(numbers))
    details = [i.detail for i in kernel.body if i.detail is not None]
    for detail in (*details, *[store.access for store in kernel.stores]):
        if isinstance(detail, Access):
            numbers += (*detail.strides, detail.offset, *detail.scales)
        elif isinstance(detail, Bits):
            numbers.append(detail.value)
        elif isinstance(detail, TensorOp):
            detail.renumbered(mapping)
    return tuple({n.text: n for n in numbers if isinstance(n, (RuntimeInt, RuntimeFloat))}.values())


def _noting(numbers: list[Any]) -> Callable[[Any], Any]:
    """Return a visitor that notes what it sees and leaves it."""

    def visit(value: Any) -> Any:
        numbers.append(value)
        return value

    return visit


def packed_parameters(kernel: Kernel) -> bytes:
    """Return the array that a kernel takes with its buffers; empty when it takes none."""
    numbers = [bits_of(number) for number in runtime_parameters(kernel)]
    return struct.pack(f"{len(numbers)}q", *numbers)


def bits_of(value: int | float) -> int:
    """Return a number as eight bytes that say what it is."""
    return (
        struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else int(value)
    )


def _mapped(kernel: Kernel, visit: Callable[[int | float], Any]) -> tuple[Kernel, tuple[int, ...]]:
    """Return a kernel with its numbers replaced, and which of its accesses stride alike."""
    mapping = _Mapping(visit)
    sizes = mapping.all_of(kernel.sizes)
    body = tuple(mapping.instruction(instruction) for instruction in kernel.body)
    stores = tuple(replace(s, access=mapping.access(s.access)) for s in kernel.stores)
    return replace(kernel, sizes=sizes, body=body, stores=stores), tuple(mapping.order)


class _Mapping:
    def __init__(self, visit: Callable[[int | float], Any]) -> None:
        self._visit = visit
        self._strides: dict[tuple[int, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}
        self.order: list[int] = []

    def one(self, value: int) -> int:
        is_structure = not is_runtime(value) and value in (0, 1)
        return value if is_structure else self._visit(value)

    def all_of(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([self.one(value) for value in values])

    def access(self, access: Access) -> Access:
        """Replace the numbers of an address; those that walk a buffer alike share their strides."""
        key = access.buffer, access.strides
        if key not in self._strides:
            self._strides[key] = len(self._strides), self.all_of(access.strides)
        group, strides = self._strides[key]
        self.order.append(group)
        return replace(
            access,
            strides=strides,
            offset=self._visit(access.offset) if access.offset else 0,
            scales=self.all_of(access.scales),
        )

    def instruction(self, instruction: Instruction) -> Instruction:
        detail = instruction.detail
        if isinstance(detail, Access):
            return replace(instruction, detail=self.access(detail))
        if isinstance(detail, Bits) and not isinstance(detail.value, bool):
            return replace(instruction, detail=Bits(self._visit(detail.value)))
        if isinstance(detail, TensorOp):
            return replace(instruction, detail=detail.renumbered(self))
        return instruction
