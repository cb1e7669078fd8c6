"""Data flow in bytecode: what becomes of the value that a call returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxkit.tracing.bytecode.decoding import FLAGS_METHODS, NULL_IS_ABOVE

_PUSHES = ("LOAD_FAST", "LOAD_CONST", "LOAD_DEREF", "LOAD_CLOSURE", "PUSH_NULL", "LOAD_FAST_CHECK")
_NOTHING = ("NOP", "CACHE", "PRECALL", "KW_NAMES", "RESUME", "EXTENDED_ARG")

_UNKNOWN = 1 << 30
_TAKES = {
    "BINARY_SUBSCR": 2,
    "BINARY_SLICE": 3,
    "CONTAINS_OP": 2,
    "IS_OP": 2,
    "UNARY_NOT": 1,
    "UNARY_INVERT": 1,
    "GET_ITER": 1,
    "TO_BOOL": 1,
    "CONVERT_VALUE": 1,
    "FORMAT_SIMPLE": 1,
    "FORMAT_WITH_SPEC": 2,
}
_USES_UP = ("FORMAT_VALUE", "FORMAT_SIMPLE", "CONVERT_VALUE", "TO_BOOL")
# How much lies above a method that is about to be called, without its arguments.
_ABOVE_METHOD = 1 if NULL_IS_ABOVE else 0


@dataclass(frozen=True, slots=True)
class Flow:
    """What a function does with a value.

    A value that stands for the result of a call has to be seen wherever it goes. It may lie in
    local variables and be given to calls that are hooked; anything else that is known is listed.

    Attributes:
        is_known: Whether nothing else is done with it.
        computes: Whether it is an operand of arithmetic, compared or written into a text.
        returns: Whether it may be returned after that.
        enters: Whether it is entered by a `with` block.
    """

    is_known: bool
    computes: bool = False
    returns: bool = False
    enters: bool = False


UNKNOWN = Flow(False)


def flow_of(instructions: list[Any], calls: set[Any], call: Any) -> Flow:
    """Tell what becomes of the result of a call.

    Args:
        instructions: The code, in the form of torch's assembler.
        calls: The calls in it that are hooked.
        call: One of them.
    """
    todo, seen, marks = [instructions.index(call)], set(), set()
    while todo:
        start = todo.pop()
        if start in seen:
            continue
        seen.add(start)
        variable = _follow(instructions, calls, start + 1, marks)
        if variable is None:
            return UNKNOWN
        todo += [
            place
            for place, instruction in enumerate(instructions)
            if variable
            and instruction.opname.startswith("LOAD_FAST")
            and instruction.argval == variable
        ]
    return Flow(True, "computes" in marks, "returns" in marks, "enters" in marks)


def loads_method(instruction: Any) -> bool:
    """Tell whether an instruction leaves a function and its object, or nothing and a value."""
    if instruction.opname == "LOAD_METHOD":
        return True
    return FLAGS_METHODS and instruction.opname == "LOAD_ATTR" and bool(instruction.arg & 1)


def _taken(name: str, arg: Any) -> int:
    """Return how many values an instruction takes to give one; many where it is not known."""
    if name in _TAKES:
        return _TAKES[name]
    if name in ("BUILD_STRING", "BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_SLICE"):
        return arg
    if name == "BUILD_MAP":
        return 2 * arg
    if name == "BUILD_CONST_KEY_MAP":
        return arg + 1
    if name == "FORMAT_VALUE":
        return 2 if arg & 4 else 1
    return _UNKNOWN


def _follow(instructions: list[Any], calls: set[Any], place: int, marks: set[str]) -> str | None:
    """Follow a value from where it is the top of the stack.

    Returns:
        The local variable that it comes to lie in; "" where it is used up; None where it gets lost.
    """
    depth, is_method, has_computed = 0, False, False
    while place < len(instructions):
        instruction = instructions[place]
        name, arg = instruction.opname, instruction.arg
        place += 1
        if name in _NOTHING:
            continue
        if name == "JUMP_FORWARD":
            place = instructions.index(instruction.target)
            continue
        if instruction.target is not None:
            marks.add("computes")
            return "" if depth == 0 and name.startswith("POP_JUMP") else None
        if name in ("CALL", "CALL_KW"):
            taken = arg + (name == "CALL_KW")
            if depth < taken or (is_method and depth == taken + _ABOVE_METHOD):
                return "" if instruction in calls else None
            if depth < taken + 2:
                return None
            depth -= taken + 1
            continue
        if is_method and depth == _ABOVE_METHOD and name not in _PUSHES and name != "LOAD_GLOBAL":
            return None
        if name in _PUSHES:
            depth += 1
        elif name == "LOAD_GLOBAL":
            depth += 1 + (arg & 1)
        elif loads_method(instruction):
            is_method = is_method or depth == 0
            depth += 1 if depth > 0 else _ABOVE_METHOD
        elif name == "LOAD_ATTR":
            if depth == 0:
                return None
        elif name in ("BINARY_OP", "COMPARE_OP"):
            if depth < 2:
                marks.add("computes")
                has_computed = True
            if depth < 2 and name == "COMPARE_OP":
                return ""
            depth = max(depth - 1, 0)
        elif name == "UNARY_NEGATIVE":
            has_computed = True
            marks.add("computes")
        elif name == "BEFORE_WITH" and depth == 0:
            marks.add("enters")
        elif name == "STORE_FAST" and depth == 0:
            return instruction.argval
        elif name == "POP_TOP" and depth == 0:
            return ""
        elif name in _USES_UP and depth == 0:
            marks.add("computes")
            return ""
        elif name == "RETURN_VALUE" and depth == 0 and has_computed:
            marks.add("returns")
            return ""
        elif depth >= _taken(name, arg):
            depth += 1 - _taken(name, arg)
        else:
            return None
    return None
