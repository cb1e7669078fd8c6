"""Decode bytecode: the instructions of a function, in one form for all known interpreters.

Interpreters differ in what an instruction is called, in which two are one, and in how an argument
leads to a name. All of that is here. What is not known is never guessed: where the interpreter is
another one, where it reads a sample otherwise than `dis` does, and where code has an instruction
that is not listed, `can_read` is false, and callers assume the worst of such code.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

_VERSIONS = ((3, 11), (3, 12), (3, 13))

NULL_IS_ABOVE = sys.version_info >= (3, 13)
"""Whether the null that marks a plain call lies above the function, rather than below it."""

FLAGS_METHODS = sys.version_info >= (3, 12)
"""Whether a bit of the argument of `LOAD_ATTR` tells that a method is loaded to be called."""

_KNOWN = frozenset(
    """
    ASYNC_GEN_WRAP BEFORE_ASYNC_WITH BEFORE_WITH BINARY_OP BINARY_SLICE BINARY_SUBSCR
    BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SET BUILD_SLICE BUILD_STRING BUILD_TUPLE CACHE
    CALL CALL_FUNCTION_EX CALL_INTRINSIC_1 CALL_INTRINSIC_2 CALL_KW CHECK_EG_MATCH CHECK_EXC_MATCH
    CLEANUP_THROW COMPARE_OP CONTAINS_OP CONVERT_VALUE COPY COPY_FREE_VARS DELETE_ATTR DELETE_DEREF
    DELETE_FAST DELETE_GLOBAL DELETE_NAME DELETE_SUBSCR DICT_MERGE DICT_UPDATE END_ASYNC_FOR END_FOR
    END_SEND EXTENDED_ARG FORMAT_SIMPLE FORMAT_VALUE FORMAT_WITH_SPEC FOR_ITER GET_AITER GET_ANEXT
    GET_AWAITABLE GET_ITER GET_LEN GET_YIELD_FROM_ITER IMPORT_FROM IMPORT_NAME IMPORT_STAR IS_OP
    JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT JUMP_FORWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP
    KW_NAMES LIST_APPEND LIST_EXTEND LIST_TO_TUPLE LOAD_ASSERTION_ERROR LOAD_ATTR LOAD_BUILD_CLASS
    LOAD_CLASSDEREF LOAD_CLOSURE LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_CHECK
    LOAD_FAST_LOAD_FAST LOAD_FROM_DICT_OR_DEREF LOAD_FROM_DICT_OR_GLOBALS LOAD_GLOBAL LOAD_LOCALS
    LOAD_METHOD LOAD_NAME LOAD_SUPER_ATTR MAKE_CELL MAKE_FUNCTION MAP_ADD MATCH_CLASS MATCH_KEYS
    MATCH_MAPPING MATCH_SEQUENCE NOP POP_EXCEPT POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE
    POP_JUMP_BACKWARD_IF_NOT_NONE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE
    POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE
    POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE POP_TOP PRECALL PREP_RERAISE_STAR
    PRINT_EXPR PUSH_EXC_INFO PUSH_NULL RAISE_VARARGS RERAISE RESUME RETURN_CONST RETURN_GENERATOR
    RETURN_VALUE SEND SETUP_ANNOTATIONS SET_ADD SET_FUNCTION_ATTRIBUTE SET_UPDATE STORE_ATTR
    STORE_DEREF STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_MAYBE_NULL STORE_FAST_STORE_FAST
    STORE_GLOBAL STORE_NAME STORE_SLICE STORE_SUBSCR SWAP TO_BOOL UNARY_INVERT UNARY_NEGATIVE
    UNARY_NOT UNARY_POSITIVE UNPACK_EX UNPACK_SEQUENCE WITH_EXCEPT_START YIELD_VALUE
    """.split()
)
_FUSED = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
_RENAMED = {"LOAD_FAST_CHECK": "LOAD_FAST"}
# By which shift the argument of an instruction is the index of a name.
_SHIFTS = {"LOAD_ATTR": int(FLAGS_METHODS), "LOAD_GLOBAL": 1, "LOAD_SUPER_ATTR": 2}
_NAMES = {code: name for name, code in dis.opmap.items() if name in _KNOWN}
_HAVE_NAMES = frozenset(_NAMES[code] for code in dis.hasname if code in _NAMES)
_HAVE_VARIABLES = frozenset(
    _NAMES[code] for code in (*dis.haslocal, *dis.hasfree) if code in _NAMES
)


def is_known() -> bool:
    """Tell whether the instructions of this interpreter are those that are read here."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in _VERSIONS:
        return False
    return _reads_as_dis_does()


def can_read(code: CodeType) -> bool:
    """Tell whether all instructions of some code are known."""
    return is_known() and set(code.co_code[::2]) <= _NAMES.keys()


def operations(code: CodeType) -> Iterator[tuple[str, int, Any]]:
    """Iterate over each instruction's name, argument, and the name of what it means, if any.

    It is what `instructions` gives, for code that `can_read`, and is had sooner.
    """
    opcodes, extended = code.co_code, 0
    names, variables = code.co_names, _variables(code)
    for place in range(0, len(opcodes), 2):
        name, argument = _NAMES[opcodes[place]], opcodes[place + 1] | extended
        extended = argument << 8 if name == "EXTENDED_ARG" else 0
        if name in ("EXTENDED_ARG", "CACHE"):
            continue
        if name in _FUSED:
            for part, index in zip(_FUSED[name], (argument >> 4, argument & 15), strict=True):
                yield part, index, variables[index]
        elif name in _HAVE_NAMES:
            yield name, argument, names[argument >> _SHIFTS.get(name, 0)]
        elif name in _HAVE_VARIABLES:
            yield _RENAMED.get(name, name), argument, variables[argument]
        else:
            yield name, argument, None


def instructions(code: CodeType) -> list[dis.Instruction]:
    """Return the instructions of code that `can_read`, those that are two as two."""
    found = []
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("CACHE", "EXTENDED_ARG"):
            continue
        if name in _FUSED:
            for part, variable in zip(_FUSED[name], instruction.argval, strict=True):
                found.append(
                    instruction._replace(
                        opname=part, opcode=dis.opmap[part], arg=0, argval=variable
                    )
                )
        else:
            found.append(instruction._replace(opname=_RENAMED.get(name, name)))
    return found


def may_handle(code: CodeType) -> bool:
    """Tell whether a function may have an `except`, a `finally`, or a `with` that may suppress."""
    if not can_read(code):
        return True
    return dis.opmap["PUSH_EXC_INFO"] in code.co_code[::2]


def _variables(code: CodeType) -> tuple[str, ...]:
    """Return the local and closure variables, by the numbers that instructions have for them."""
    own = [name for name in code.co_cellvars if name not in code.co_varnames]
    return (*code.co_varnames, *own, *code.co_freevars)


# Whether the above is so --------------------------------------------------------------------------


@functools.cache
def _reads_as_dis_does() -> bool:
    return all(map(_is_read_as_dis_does, _samples()))


def _is_read_as_dis_does(code: CodeType) -> bool:
    if not set(code.co_code[::2]) <= _NAMES.keys():
        return False
    ours = [(name, value) for name, _, value in operations(code) if value is not None]
    theirs = [
        (it.opname, it.argval)
        for it in instructions(code)
        if it.opname in _HAVE_NAMES or it.opname in _HAVE_VARIABLES
    ]
    return ours == theirs


def _samples() -> list[CodeType]:
    codes = [_sample.__code__]
    for code in codes:
        codes += [part for part in code.co_consts if isinstance(part, CodeType)]
    return codes


def _sample(first: Any, second: Any = None, *rest: Any, **others: Any) -> Any:
    """Use each instruction that has a name; this is only looked at, and never runs."""
    global _sampled
    import os.path
    from sys import path

    both = [(os, path), *rest]
    _sampled = first.one.two(second, first.three, key=_sampled.four)
    third, fourth = first, second

    class Inner(type(third)):
        kind = _sampled
        name = other = kind

        def method(self) -> Any:
            nonlocal fourth
            fourth = self.five
            self.six = super().seven(first, third), super().eight
            del self.nine
            return first

    try:
        return [Inner.ten(fourth, item, **others) for item in both if item or second]
    finally:
        del _sampled, both
