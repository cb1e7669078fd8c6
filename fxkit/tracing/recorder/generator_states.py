"""States of random generators that a program may draw from: put back before it runs again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from fxkit.torch_adapters import pytree
from fxkit.tracing.guarding.state_containers import content
from fxkit.tracing.recorder.state_restore import random_states, set_random_states


class GeneratorStates:
    """The states of generators now: torch's, Python's and NumPy's own, and those of a program.

    Of a program those are known that are among its arguments, in a closure, in a global that its
    code names, or an attribute of its modules.

    Args:
        fn: The program.
        given: What it is given.
    """

    def __init__(self, fn: Any, given: Any) -> None:
        self._torch = random_states()
        self._puts: list[Callable[[], object]] = [
            _put(random.setstate, random.getstate()),
            _put(np.random.set_state, np.random.get_state()),
        ]
        for one in {id(it): it for it in _candidates(fn, given)}.values():
            if type(one) is torch.Generator:
                self._puts.append(_put(one.set_state, one.get_state()))
            elif type(one) is random.Random:
                self._puts.append(_put(one.setstate, one.getstate()))
            elif type(one) is np.random.RandomState:
                self._puts.append(_put(one.set_state, one.get_state()))
            elif type(one) is np.random.Generator:
                self._puts.append(_put_bits(one.bit_generator, one.bit_generator.state))

    def restore(self) -> None:
        """Put all of them back."""
        set_random_states(self._torch)
        for put in self._puts:
            put()


def _put(setter: Callable[[Any], object], state: Any) -> Callable[[], object]:
    return lambda: setter(state)


def _put_bits(generator: Any, state: Any) -> Callable[[], object]:
    return lambda: setattr(generator, "state", state)


def _candidates(fn: Any, given: Any) -> Iterator[Any]:
    """Yield what may be generators: what a program is given, and what is stored around it."""
    yield from pytree.tree_leaves(given)
    if isinstance(fn, torch.nn.Module):
        for module in fn.modules():
            yield from vars(module).values()
        fn = fn.forward
    function = fn.__func__ if isinstance(fn, MethodType) else fn
    if isinstance(function, FunctionType):
        cells: tuple[CellType, ...] = function.__closure__ or ()
        yield from map(content, cells)
        yield from (function.__globals__.get(name) for name in function.__code__.co_names)
        yield from function.__defaults__ or ()
