"""Code whose calls ask a hook what to call, assembled from the code of a function."""

from __future__ import annotations

import copy
import dis
from collections.abc import Callable
from types import CodeType
from typing import Any

from fxkit.torch_adapters.bytecode import find_assembler
from fxkit.tracing.bytecode.decoding import NULL_IS_ABOVE
from fxkit.tracing.bytecode.value_flow import UNKNOWN, Flow, flow_of, loads_method

ToCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
Hook = Callable[[Any, tuple[Any, ...], dict[str, Any], Flow], ToCall]

_NULL, _VALUE = "null", "value"
_DEPTH = 64


class CallSite:
    """One call in a function's code; says what the code has to call, the function on top.

    Args:
        hook: Is asked what to call.
        names: The names of the last arguments, which are given by keyword.
        flow: What the code does with the result.
    """

    def __init__(self, hook: Hook, names: tuple[str, ...], flow: Flow) -> None:
        self._hook = hook
        self._names = names
        self._flow = flow

    def __call__(self, function: Any, args: Any, kwargs: Any = None) -> Any:
        count = len(self._names)
        if count:
            kwargs = dict(zip(self._names, args[-count:], strict=True))
            args = args[:-count]
        function, args, kwargs = self._hook(function, tuple(args), dict(kwargs or {}), self._flow)
        return kwargs, args, function


def hook_calls(code: CodeType, hook: Hook) -> CodeType | None:
    """Return code whose calls ask a hook; None where torch's assembler is missing or refuses."""
    assembler = find_assembler()
    if assembler is None:
        return None

    def change(instructions: list[Any], options: dict[str, Any]) -> None:
        _put_hooks(instructions, code, hook, assembler.create_instruction)

    try:
        return assembler.transform_code_object(code, change)[0]
    except (AssertionError, RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return None  # an instruction that the assembler of this torch does not know


def _put_hooks(
    instructions: list[Any], code: CodeType, hook: Hook, make: Callable[..., Any]
) -> None:
    """Let the calls among a function's instructions ask a hook; the list is changed in place."""
    calls = calls_of_plain_values(instructions)
    names: tuple[str, ...] = ()
    changed: list[Any] = []
    firsts: dict[Any, Any] = {}
    exits = _exits(instructions) - calls
    hooked_calls = calls | exits
    flows = {call: flow_of(instructions, hooked_calls, call) for call in calls}
    marks = _marks_of_handlers(instructions)
    for place, instruction in enumerate(instructions):
        if instruction.opname == "KW_NAMES":
            names = code.co_consts[instruction.arg]
        if instruction.opname == "CALL_KW":
            names = instructions[place - 1].argval
        new: list[Any] = []
        if instruction in calls:
            site = CallSite(hook, names, flows[instruction])
            new = _hooked_call(instruction, site, make)
        elif instruction in exits:
            new = _hooked_exit(CallSite(hook, (), UNKNOWN), make)
        elif loads_method(instruction):
            new = _loaded_without_method(instruction, make)
        if instruction.opname in ("CALL", "CALL_KW", "CALL_FUNCTION_EX"):
            names = ()
        before = [make("NOP"), *new[:-1]] if instruction in marks else new[:-1]
        for item in before:
            item.copy_positions(instruction)
            item.exn_tab_entry = copy.copy(instruction.exn_tab_entry)
            changed.append(item)
        if before:
            firsts[instruction] = before[0]
        if new:
            _become(instruction, new[-1])
        changed.append(instruction)
    instructions[:] = _without_argument_names(changed, firsts)
    _retarget(instructions, firsts)


def _marks_of_handlers(instructions: list[Any]) -> set[Any]:
    """Return where handlers, and what they handle, begin.

    torch's assembler (2.11 to 2.14) loses its place where such an instruction gets an argument of
    more than a byte, by a jump or a name that is far away. A NOP in front never does.
    """
    entries = [item.exn_tab_entry for item in instructions if item.exn_tab_entry is not None]
    return {mark for entry in entries for mark in (entry.start, entry.target)}


def _hooked_call(call: Any, site: CallSite, make: Callable[..., Any]) -> list[Any]:
    """Return what asks a site, given `(function, args)` with or without `kwargs`, and calls."""
    packed = [] if call.opname == "CALL_FUNCTION_EX" else [make("BUILD_TUPLE", arg=call.arg)]
    if call.opname == "CALL_KW":  # the names lie above the arguments, and the site knows them
        packed.insert(0, make("POP_TOP"))
    count = 2 + (call.opname == "CALL_FUNCTION_EX" and call.arg & 1)
    if not NULL_IS_ABOVE:
        return [*packed, make("BUILD_TUPLE", arg=count), *_asked(site, make)]
    # The site takes the function's place below the null, and the function comes before the rest.
    packed += [make("LOAD_CONST", argval=site), make("SWAP", arg=count + 2)]
    packed += [make("SWAP", arg=place) for place in range(count, 1, -1)]
    return [*packed, make("BUILD_TUPLE", arg=count), *_called_through(make)]


def _asked(site: CallSite, make: Callable[..., Any]) -> list[Any]:
    """Return what asks a site about the packed call above a null, and makes the call."""
    return [make("LOAD_CONST", argval=site), make("SWAP", arg=2), *_called_through(make)]


def _called_through(make: Callable[..., Any]) -> list[Any]:
    """Return what calls a site with what lies above it, and makes the call that it says."""
    if NULL_IS_ABOVE:
        return [
            make("CALL_FUNCTION_EX", arg=0),
            make("UNPACK_SEQUENCE", arg=3),
            make("PUSH_NULL"),
            make("SWAP", arg=3),
            make("SWAP", arg=2),
            make("CALL_FUNCTION_EX", arg=1),
        ]
    return [
        make("CALL_FUNCTION_EX", arg=0),
        make("PUSH_NULL"),
        make("SWAP", arg=2),
        make("UNPACK_SEQUENCE", arg=3),
        make("CALL_FUNCTION_EX", arg=1),
    ]


def _exits(instructions: list[Any]) -> set[Any]:
    """Return the calls that leave a `with` block: of what lies below three times None."""
    found = set()
    kept = [item for item in instructions if item.opname != "PRECALL"]
    for place, instruction in enumerate(kept):
        before = kept[max(place - 3, 0) : place]
        is_exit = len(before) == 3 and all(
            item.opname == "LOAD_CONST" and item.argval is None for item in before
        )
        if is_exit and instruction.opname == "CALL" and instruction.arg == 2:
            found.add(instruction)
    return found


def _hooked_exit(site: CallSite, make: Callable[..., Any]) -> list[Any]:
    packed = [make("BUILD_TUPLE", arg=3), make("BUILD_TUPLE", arg=2)]
    if not NULL_IS_ABOVE:
        return [*packed, make("PUSH_NULL"), make("SWAP", arg=2), *_asked(site, make)]
    below = [make("LOAD_CONST", argval=site), make("SWAP", arg=2)]
    return [*packed, *below, make("PUSH_NULL"), make("SWAP", arg=2), *_called_through(make)]


def _loaded_without_method(load: Any, make: Callable[..., Any]) -> list[Any]:
    """Return what leaves nothing and the bound method where `load` leaves function and object."""
    if NULL_IS_ABOVE:
        return [make("LOAD_ATTR", argval=load.argval), make("PUSH_NULL")]
    return [make("PUSH_NULL"), make("SWAP", arg=2), make("LOAD_ATTR", argval=load.argval)]


def _become(instruction: Any, other: Any) -> None:
    instruction.opcode, instruction.opname = other.opcode, other.opname
    instruction.arg, instruction.argval = other.arg, other.argval


def _retarget(instructions: list[Any], firsts: dict[Any, Any]) -> None:
    """Let jumps and handlers that began at an instruction begin at what was put before it."""
    for instruction in instructions:
        if instruction.target in firsts:
            instruction.target = firsts[instruction.target]
        entry = instruction.exn_tab_entry
        if entry is not None:
            entry.start = firsts.get(entry.start, entry.start)
            entry.target = firsts.get(entry.target, entry.target)


def _without_argument_names(instructions: list[Any], firsts: dict[Any, Any]) -> list[Any]:
    """Drop what prepares calls that are hooked now, and note what stands in its place."""
    kept: list[Any] = []
    for instruction in instructions:
        if instruction.opname == "BUILD_TUPLE":
            while kept and kept[-1].opname in ("KW_NAMES", "PRECALL"):
                firsts[kept.pop()] = instruction
        kept.append(instruction)
    return kept


def calls_of_plain_values(instructions: list[Any]) -> set[Any]:
    """Return the calls below whose function nothing lies, which is so of all but a few kinds."""
    found: set[Any] = set()
    stacks: dict[Any, list[str]] = {}
    before: list[str] | None = []
    for index, instruction in enumerate(instructions):
        stack = stacks.get(instruction, before)
        if stack is None:  # where a handler begins, below which lies nothing that is called
            stack = [_VALUE] * _DEPTH
        depth = _depth_of_null(instructions, index)
        if depth is not None and _is_null(stack, depth) and not _sees_frame(instructions, index):
            found.add(instruction)
        if instruction.target is not None:
            stacks.setdefault(instruction.target, _after(stack, instruction, jump=True))
        before = (
            None if _never_goes_on(instruction.opname) else _after(stack, instruction, jump=False)
        )
    return found


def _depth_of_null(instructions: list[Any], index: int) -> int | None:
    """Return how deep below the top of the stack the null of a call lies; None for no call."""
    call = instructions[index]
    if call.opname == "CALL":
        taken = call.arg
    elif call.opname == "CALL_KW" and instructions[index - 1].opname == "LOAD_CONST":
        taken = call.arg + 1
    elif call.opname == "CALL_FUNCTION_EX":
        taken = 1 + (call.arg & 1)
    else:
        return None
    return taken + (1 if NULL_IS_ABOVE else 2)


def _is_null(stack: list[str], depth: int) -> bool:
    return len(stack) >= depth and stack[-depth] is _NULL


def _never_goes_on(name: str) -> bool:
    return name in ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE") or name.startswith(
        ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
    )


def _sees_frame(instructions: list[Any], index: int) -> bool:
    """Tell whether a call is `super()`, which looks into the frame that calls it."""
    before = [i for i in instructions[max(index - 3, 0) : index] if i.opname != "PRECALL"]
    return bool(before) and before[-1].opname == "LOAD_GLOBAL" and before[-1].argval == "super"


def _after(stack: list[str], instruction: Any, *, jump: bool) -> list[str]:
    name, arg = instruction.opname, instruction.arg
    called = [_VALUE, _NULL] if NULL_IS_ABOVE else [_NULL, _VALUE]
    if name == "PUSH_NULL":
        return [*stack, _NULL]
    if loads_method(instruction):
        return [*stack[:-1], *called]
    if name == "LOAD_GLOBAL" and arg & 1:
        return [*stack, *called]
    if name == "SWAP":
        new = list(stack)
        new[-1], new[-arg] = new[-arg], new[-1]
        return new
    if name == "COPY":
        return [*stack, stack[-arg]]
    if name == "PRECALL":  # CPython 3.11 counts the arguments here, and not where they are taken
        return stack
    if name in ("CALL", "CALL_KW"):
        return [*stack[: -arg - 2 - (name == "CALL_KW")], _VALUE]
    effect = dis.stack_effect(
        instruction.opcode, arg if instruction.opcode >= dis.HAVE_ARGUMENT else None, jump=jump
    )
    new = stack[:effect] if effect < 0 else [*stack, *[_VALUE] * effect]
    if new and effect < 0 and name != "POP_TOP" and not _stores(name):
        new = [*new[:-1], _VALUE]
    return new


def _stores(name: str) -> bool:
    return name.startswith(("STORE_", "POP_JUMP", "DELETE_"))
