"""Random generators, iterators and functions in C: used where their calls are seen, or refused."""

from __future__ import annotations

import io
import random
from collections.abc import Iterable
from types import CodeType
from typing import Any

import numpy as np
import torch

from fxkit.torch_adapters import pytree
from fxkit.tracing.bytecode.call_hooks import has_hooks, is_given_to_calls, original
from fxkit.tracing.bytecode.code_names import names_in
from fxkit.tracing.bytecode.decoding import can_read, instructions
from fxkit.tracing.environment.call_watch import Watcher
from fxkit.tracing.environment.environment_walk import EnvironmentWalk
from fxkit.tracing.environment.object_kinds import DEFAULT_OF
from fxkit.tracing.environment.opaque_objects import hands_on, hidden_call, is_hidden
from fxkit.tracing.values.refusals import Refusal
from fxkit.tracing.values.stored import in_classes, is_a, qualname_of

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, io.IOBase)
_FROM_MEMORY = frozenset({"from_numpy", "frombuffer", "as_tensor", "asarray"})
_NOTHING = ("PRECALL", "CACHE", "NOP", "PUSH_NULL")


def check_strangers(reach: EnvironmentWalk, watcher: Watcher) -> None:
    """Refuse objects whose state can't be told, unless all that is done is to call their methods.

    Args:
        reach: What the program refers to.
        watcher: Knows which code ran; is told which code to hook the next time.

    Raises:
        Refusal: When an object may be read unseen.
    """
    for value, path in reach.strangers:
        name, users = _users(path, watcher.codes)
        if not users and name.isidentifier() and not reach.reads_all:
            continue
        is_generator = is_a(value, _GENERATORS)
        is_iterator = in_classes(type(value), "__next__") and not is_a(value, io.IOBase)
        is_used_well = _calls_only if is_generator else _asks_for_next
        is_well = name.isidentifier() and all(is_used_well(code, name) for code in users)
        if (is_generator or is_iterator) and is_well:
            unseen = [code for code in users if not has_hooks(code)]
            watcher.blamed.update(unseen)
            if users and not unseen:
                continue
        why = "which is another one after each read" if is_iterator else "whose state can't be told"
        raise Refusal(
            f"the program may read {path or 'an object'}, a {qualname_of(type(value))}, {why}",
            "read it outside, and pass what it gives as an argument",
        )


def _users(path: str, codes: Iterable[CodeType]) -> tuple[str, list[CodeType]]:
    """Return the name by which code reads what lies at a path, and the code that has the name."""
    if path.startswith(DEFAULT_OF):
        name = path.removeprefix(DEFAULT_OF)
        return name, [code for code in codes if name in code.co_varnames]
    name = path.replace("]", "").replace("[", ".").rpartition(".")[2]
    return name, [code for code in codes if _names(code, name)]


def check_handed_on(reach: EnvironmentWalk) -> None:
    """Refuse code that may let C code call a function in C, which nothing would report.

    Args:
        reach: What the program refers to.

    Raises:
        Refusal: When there is such code.
    """
    codes = [names_in(code) for code in reach.codes]
    for value, name in reach.unseen:
        if any(hands_on(code, name) for code in codes):
            raise Refusal(*hidden_call("", value))


def draws_unseen(code: CodeType) -> bool:
    """Tell whether some code names a function of `numpy.random` whose calls are not reported."""
    names = names_in(code)
    return any(
        is_hidden(getattr(np.random, name, None)) for name in names.attributes | names.globals
    )


def shares_memory(code: CodeType) -> bool:
    """Tell whether some code may make tensors out of NumPy arrays or other memory."""
    return not _FROM_MEMORY.isdisjoint(names_in(code).attributes | names_in(code).globals)


def is_unseen(function: Any, given: Any) -> bool:
    """Tell whether a torch call that a graph can't hold may be kept as an opaque call."""
    return any(type(leaf) is torch.Generator for leaf in pytree.tree_leaves(given))


def _names(code: CodeType, name: str) -> bool:
    names = names_in(code)
    return name in names.attributes or name in names.globals or name in code.co_freevars


def _asks_for_next(code: CodeType, name: str) -> bool:
    """Tell whether code does no more with what has a name than to write `next(...)` of it."""
    code = original(code)
    if not can_read(code):
        return False
    kept = [i for i in instructions(code) if i.opname not in _NOTHING]
    for place, instruction in enumerate(kept):
        is_load = instruction.argval == name and instruction.opname.startswith("LOAD_")
        if not is_load or instruction.opname == "LOAD_CLOSURE":
            continue
        before = [item.argval for item in kept[max(place - 3, 0) : place]]
        after = kept[place + 1]
        if "next" not in before or after.opname != "CALL" or after.arg != 1:
            return False
    return True


def _calls_only(code: CodeType, name: str) -> bool:
    """Tell whether code does no more with what has a name than calls that can be hooked see."""
    return is_given_to_calls(original(code), name)
