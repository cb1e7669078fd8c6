"""Which names the bytecode of a function reads and writes: globals, attributes, modules."""

from __future__ import annotations

import dis
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from fxkit.tracing.bytecode.decoding import (
    FLAGS_METHODS,
    NULL_IS_ABOVE,
    can_read,
    instructions,
    operations,
)

_KINDS = {
    "LOAD_ATTR": ("attributes",),
    "LOAD_METHOD": ("attributes",),
    "LOAD_SUPER_ATTR": ("attributes",),
    "IMPORT_FROM": ("attributes",),
    "LOAD_NAME": ("attributes", "globals"),
    "LOAD_FROM_DICT_OR_GLOBALS": ("attributes", "globals"),
    "STORE_ATTR": ("stored",),
    "DELETE_ATTR": ("stored",),
    "LOAD_GLOBAL": ("globals",),
    "STORE_GLOBAL": ("globals",),
    "DELETE_GLOBAL": ("globals",),
    "IMPORT_NAME": ("imports",),
}
_REFLECTIVE = frozenset(
    {"vars", "dir", "__dict__", "attrgetter", "methodcaller", "asdict", "__getattribute__"}
)
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_READS_BY_NAME = frozenset({"getattr", "hasattr"})
_READS_ALL = frozenset({"vars", "dir"})
_BY_TEXT = _BY_NAME | _READS_ALL | {"__dict__"}
_TAKES_VALUES = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR"})
_FLAGGED = frozenset({"LOAD_GLOBAL", "LOAD_ATTR"} if FLAGS_METHODS else {"LOAD_GLOBAL"})
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


class _Found:
    """The sets that `CodeNames` is made of, while they are gathered."""

    def __init__(self) -> None:
        self.kinds: dict[str, set[str]] = {
            kind: set() for kind in ("globals", "attributes", "stored", "imports")
        }
        self.strings: set[str] = set()
        self.values: set[str] = set()
        self.asked: set[str] = set()
        self.reflected: set[str] = set()
        self.asks_by_computed_name = False

    def read(self, code: CodeType) -> None:
        """Add the names in some code, of which all instructions are known."""
        self.values.update(_values(code))
        if not _BY_TEXT.isdisjoint(code.co_names):
            read = instructions(code)
            for of, name in _by_text(read):
                (self.reflected if name is None else self.asked).add(of if name is None else name)
            self.asks_by_computed_name |= _computes_names(read)
        if any(name == "MATCH_CLASS" for name, _, _ in operations(code)):
            self.kinds["attributes"].update(_texts_together(code))
        for name, _, value in operations(code):
            for kind in _KINDS.get(name, ()):
                self.kinds[kind].add(value)

    def assume(self, code: CodeType) -> None:
        """Add the names in some code as if it did all that can be done with each of them."""
        names = {part for name in code.co_names for part in (name, name.partition(".")[0])}
        variables = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        for kind in self.kinds.values():
            kind.update(names)
        self.kinds["attributes"].update(_texts_together(code))
        self.values |= names | variables
        if not _BY_TEXT.isdisjoint(names):
            self.asked.update(text for text in code.co_consts if isinstance(text, str))
            self.reflected |= {*names, *variables, ""}  # what has no name counts as well
            self.asks_by_computed_name = True


# It asks sys.modules for two modules whose names of process and task it keeps. Through the dict
# a walk would reach all that the process has imported, which takes seconds.
_LOG_RECORD = logging.LogRecord.__init__.__code__


@functools.lru_cache(maxsize=8192)
def names_in(code: CodeType) -> CodeNames:
    """Return the names in a function's code."""
    found = _Found()
    codes = [code]
    for part in codes:
        found.read(part) if can_read(part) else found.assume(part)
        for constant in part.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif isinstance(constant, str):
                found.strings.add(constant)
    kinds = found.kinds
    if code is _LOG_RECORD:
        kinds["attributes"].discard("modules")
    used = kinds["globals"] | kinds["attributes"]
    return CodeNames(
        frozenset(kinds["globals"]),
        frozenset(kinds["attributes"] | found.asked),
        frozenset(kinds["stored"]),
        frozenset(kinds["imports"]),
        frozenset(codes),
        found.asks_by_computed_name or not _REFLECTIVE.isdisjoint(used),
        frozenset(found.strings),
        frozenset(found.values),
        frozenset(found.asked),
        frozenset(found.reflected),
    )


def _values(code: CodeType) -> Iterator[str]:
    """Iterate over the names that code loads other than as the function of a call.

    CPython puts a null below or above a function that it is about to call: by an instruction of its
    own, or together with a global or a method, which a bit of the argument tells.
    """
    read = [it for it in operations(code) if it[0] != "NOP"]
    is_called = False
    for place, (name, argument, value) in enumerate(read):
        if name not in _TAKES_VALUES:
            is_called = False
            continue
        beside = read[place + 1 if NULL_IS_ABOVE else place - 1][0]
        has_null = beside == "PUSH_NULL" or (name in _FLAGGED and bool(argument & 1))
        is_chain = is_called and name == "LOAD_ATTR" and not NULL_IS_ABOVE
        is_called = has_null or is_chain
        if not is_called:
            yield value


def _computes_names(read: list[dis.Instruction]) -> bool:
    """Tell whether code asks for an attribute by a name that is not written there as a constant."""
    for place, instruction in enumerate(read):
        if instruction.argval not in _READS_BY_NAME or not instruction.opname.startswith("LOAD_"):
            continue
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            return True
        if _text_given(read, place) is None:
            return True
    return False


def _text_given(read: list[dis.Instruction], place: int) -> str | None:
    """Return the text that a call is given behind a variable; None where it is computed."""
    place += 1
    while place < len(read) and read[place].opname in _PATHS:
        place += 1
    if place == len(read):
        return None
    text, depth = read[place], 0
    if text.opname != "LOAD_CONST" or not isinstance(text.argval, str):
        return None
    for instruction in read[place + 1 :]:
        arg = instruction.arg or 0
        if instruction.opname in ("PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION_EX"):
            taken = arg + 2 + (instruction.opname == "CALL_KW")
            if depth < taken:
                return text.argval
            if instruction.opname != "PRECALL":
                depth -= taken - 1
            continue
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        takes = 1 if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") else 1 - effect
        is_load = effect > 0 and instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD")
        if not (is_load or instruction.opname in ("NOP", "KW_NAMES")) and depth < takes:
            return None  # the text is an operand of something else
        depth += effect
    return None


def _by_text(read: list[dis.Instruction]) -> Iterator[tuple[str, str | None]]:
    """Iterate over `(variable, attribute)` for each attribute that is named by a text.

    The attribute is None where its name is computed, or where all attributes are asked for.
    """
    for place, instruction in enumerate(read):
        name, is_load = instruction.argval, instruction.opname.startswith("LOAD_")
        if not is_load or not isinstance(name, str):
            continue
        if name == "__dict__" and instruction.opname not in ("LOAD_GLOBAL", "LOAD_CONST"):
            before = reversed(read[:place])
            first = next((i for i in before if i.opname != "LOAD_ATTR"), instruction)
            yield str(first.argval), None
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            continue
        first = str(read[place + 1].argval)
        if name in _READS_ALL:
            yield first, None
        elif name in _BY_NAME:
            yield first, _text_given(read, place)


def _texts_together(code: CodeType) -> Iterator[str]:
    """Iterate over the texts in tuples, as patterns of `match` name attributes."""
    for constant in code.co_consts:
        if isinstance(constant, tuple):
            yield from (name for name in constant if isinstance(name, str))
