"""Which objects written in C have state that no guard can compare."""

from __future__ import annotations

import collections
import io
import queue
import random
import re
import typing

import numpy as np
import pytest

from fxkit.tracing.environment.opaque_objects import has_native_state

_Pair = collections.namedtuple("_Pair", ["left", "right"])

_KNOWN = {
    "a field of a named tuple": vars(_Pair)["left"],
    "a type variable": typing.TypeVar("T"),
    "a pattern": re.compile("a"),
    "a union": int | str,
    "a deque": collections.deque(),
    "an array": np.zeros(2),
}
_STRANGE = {
    "a generator": random.Random(0),
    "NumPy's generator": np.random.default_rng(0),
    "a queue": queue.SimpleQueue(),
    "a stream": io.StringIO(),
    "a memory view": memoryview(b""),
}


@pytest.mark.parametrize("name", _KNOWN)
def test_what_is_no_stranger(name: str):
    assert not has_native_state(type(_KNOWN[name]))


@pytest.mark.parametrize("name", _STRANGE)
def test_strangers(name: str):
    assert has_native_state(type(_STRANGE[name]))
