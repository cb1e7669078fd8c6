"""Which names the bytecode of a function reads and writes: globals, attributes, modules."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

# By which shift the argument of an instruction is the index of a name.
_SHIFTS = {
    "LOAD_ATTR": 1 if sys.version_info >= (3, 12) else 0,
    "LOAD_GLOBAL": 1,
    "LOAD_SUPER_ATTR": 2,
}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM", "LOAD_NAME")
_STORES = ("STORE_ATTR", "DELETE_ATTR")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
_REFLECTIVE = frozenset(
    {"vars", "dir", "__dict__", "attrgetter", "methodcaller", "asdict", "__getattribute__"}
)
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_READS_BY_NAME = frozenset({"getattr", "hasattr"})
_READS_ALL = frozenset({"vars", "dir"})
_BY_TEXT = _BY_NAME | _READS_ALL | {"__dict__"}
_VARIABLES = ("LOAD_FAST", "LOAD_DEREF")
_TAKES_VALUES = {
    dis.opmap[name]: name for name in (*_VARIABLES, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR")
}
_FLAGGED = ("LOAD_GLOBAL", "LOAD_ATTR") if sys.version_info >= (3, 12) else ("LOAD_GLOBAL",)
_EXTENDED, _CACHE = dis.opmap["EXTENDED_ARG"], dis.opmap["CACHE"]
_PUSH_NULL, _MATCH_CLASS = dis.opmap["PUSH_NULL"], dis.opmap["MATCH_CLASS"]
_PATHS = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR"})


@dataclass(frozen=True, slots=True)
class CodeNames:
    """The names in a function's code and in that of the functions defined in it.

    Attributes:
        globals: Globals that it reads or writes.
        attributes: Attributes that it reads.
        stored: Attributes that it writes.
        imports: Modules that it imports.
        codes: The code itself and those nested in it.
        is_reflective: Whether it may read attributes by names that are not written in it.
        strings: Its constants that are texts, which may be such names.
        values: Globals, attributes and variables that it takes for more than to call them.
        asked: Attributes that it asks for by their names as texts, and that may not be there.
        reflected: Variables whose attributes it reads by computed names, or all of them.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    stored: frozenset[str]
    imports: frozenset[str]
    codes: frozenset[CodeType]
    is_reflective: bool
    strings: frozenset[str]
    values: frozenset[str]
    asked: frozenset[str]
    reflected: frozenset[str]


@functools.lru_cache(maxsize=8192)
def names_in(code: CodeType) -> CodeNames:
    """Return the names in a function's code."""
    found: dict[str, set[str]] = {
        kind: set() for kind in ("globals", "attributes", "stored", "imports")
    }
    codes, strings, values = [code], set(), set()
    asked, reflected = set(), set()
    asks_by_computed_name = False
    for part in codes:
        values.update(_values(part))
        if not _BY_TEXT.isdisjoint(part.co_names):
            instructions = _instructions(part)
            for of, name in _by_text(instructions):
                (reflected if name is None else asked).add(of if name is None else name)
            asks_by_computed_name |= _computes_names(instructions)
        found["attributes"].update(_in_patterns(part))
        for kind, name in _named(part):
            found[kind].add(name)
        for constant in part.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif isinstance(constant, str):
                strings.add(constant)
    used = found["globals"] | found["attributes"]
    return CodeNames(
        frozenset(found["globals"]),
        frozenset(found["attributes"] | asked),
        frozenset(found["stored"]),
        frozenset(found["imports"]),
        frozenset(codes),
        asks_by_computed_name or not _REFLECTIVE.isdisjoint(used),
        frozenset(strings),
        frozenset(values),
        frozenset(asked),
        frozenset(reflected),
    )


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [it for it in dis.get_instructions(code) if it.opname not in ("CACHE", "EXTENDED_ARG")]


def _operations(code: CodeType) -> Iterator[tuple[int, int]]:
    """Iterate over the operation and the argument of each instruction; faster than `dis` is."""
    instructions, extended = code.co_code, 0
    for place in range(0, len(instructions), 2):
        operation, argument = instructions[place], instructions[place + 1] | extended
        extended = argument << 8 if operation == _EXTENDED else 0
        if operation not in (_EXTENDED, _CACHE):
            yield operation, argument


def _values(code: CodeType) -> Iterator[str]:
    """Iterate over the names that code loads other than as the function of a call.

    CPython puts a null below a function that it is about to call: by an instruction of its own, or
    together with a global or a method, which a bit of the argument tells.
    """
    is_next, is_called = False, False
    names, name_of_variable = code.co_names, code._varname_from_oparg  # type: ignore[attr-defined]
    for operation, argument in _operations(code):
        name = _TAKES_VALUES.get(operation)
        if name is None:
            is_called = False
        else:
            has_null = name in _FLAGGED and bool(argument & 1)
            is_called = is_next or has_null or (is_called and name == "LOAD_ATTR")
            if not is_called:
                is_variable = name in _VARIABLES
                shift = _SHIFTS.get(name, 0)
                yield name_of_variable(argument) if is_variable else names[argument >> shift]
        is_next = operation == _PUSH_NULL


def _computes_names(instructions: list[dis.Instruction]) -> bool:
    """Tell whether code asks for an attribute by a name that is not written there as a constant."""
    for place, instruction in enumerate(instructions):
        if instruction.argval not in _READS_BY_NAME or not instruction.opname.startswith("LOAD_"):
            continue
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            return True
        if _text_given(instructions, place) is None:
            return True
    return False


def _text_given(instructions: list[dis.Instruction], place: int) -> str | None:
    """Return the text that a call is given behind a variable; None where it is computed."""
    place += 1
    while place < len(instructions) and instructions[place].opname in _PATHS:
        place += 1
    if place == len(instructions):
        return None
    text, depth = instructions[place], 0
    if text.opname != "LOAD_CONST" or not isinstance(text.argval, str):
        return None
    for instruction in instructions[place + 1 :]:
        arg = instruction.arg or 0
        if instruction.opname in ("PRECALL", "CALL", "CALL_FUNCTION_EX"):
            if depth < arg + 2:
                return text.argval
            if instruction.opname == "PRECALL":
                continue
            depth -= arg + 1
            continue
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        takes = 1 if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") else 1 - effect
        is_load = effect > 0 and instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD")
        if not (is_load or instruction.opname in ("NOP", "KW_NAMES")) and depth < takes:
            return None  # the text is an operand of something else
        depth += effect
    return None


def _by_text(instructions: list[dis.Instruction]) -> Iterator[tuple[str, str | None]]:
    """Iterate over `(variable, attribute)` for each attribute that is named by a text.

    The attribute is None where its name is computed, or where all attributes are asked for.
    """
    for place, instruction in enumerate(instructions):
        name, is_load = instruction.argval, instruction.opname.startswith("LOAD_")
        if not is_load or not isinstance(name, str):
            continue
        if name == "__dict__" and instruction.opname not in ("LOAD_GLOBAL", "LOAD_CONST"):
            before = reversed(instructions[:place])
            first = next((i for i in before if i.opname != "LOAD_ATTR"), instruction)
            yield str(first.argval), None
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        first = str(instructions[place + 1].argval)
        if name in _READS_ALL:
            yield first, None
        elif name in _BY_NAME:
            yield first, _text_given(instructions, place)


def _in_patterns(code: CodeType) -> Iterator[str]:
    """Iterate over the attributes that patterns of `match` name."""
    if any(code.co_code[place] == _MATCH_CLASS for place in range(0, len(code.co_code), 2)):
        for constant in code.co_consts:
            if isinstance(constant, tuple):
                yield from (name for name in constant if isinstance(name, str))


def _kinds() -> dict[int, list[tuple[str, int]]]:
    kinds: dict[int, list[tuple[str, int]]] = {}
    for group, names in (
        ("globals", _GLOBALS),
        ("attributes", _ATTRIBUTES),
        ("stored", _STORES),
        ("imports", ("IMPORT_NAME",)),
    ):
        for name in names:
            if name in dis.opmap:
                kinds.setdefault(dis.opmap[name], []).append((group, _SHIFTS.get(name, 0)))
    return kinds


_KINDS = _kinds()


def _named(code: CodeType) -> Iterator[tuple[str, str]]:
    """Iterate over `(kind, name)` for each instruction that names something."""
    names = code.co_names
    for operation, argument in _operations(code):
        for kind, shift in _KINDS.get(operation, ()):
            yield kind, names[argument >> shift]
