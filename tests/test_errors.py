"""The form of messages."""

from __future__ import annotations

import inspect

import pytest

from fxkit import errors
from fxkit.errors import BuildError, FxkitError, PassError, PostconditionError


def test_message_holds_what_is_known_in_a_fixed_order():
    error = FxkitError(
        "expected f32, got i64",
        repro="run.py",
        hint="cast it",
        in_pass="fold (3/7)",
        source="model.py:41 in forward",
        node="%add = aten.add(%x, %y)",
    )
    assert str(error) == (
        "expected f32, got i64\n"
        "  node:  %add = aten.add(%x, %y)\n"
        "  from:  model.py:41 in forward\n"
        "  pass:  fold (3/7)\n"
        "  hint:  cast it\n"
        "  repro: run.py"
    )


def test_message_leaves_out_what_is_not_known():
    assert str(FxkitError("expected a, got b")) == "expected a, got b"


def test_build_error_names_command_and_log():
    error = BuildError("expected it to build, got line 3", command="g++ x.cpp", log="/tmp/log")
    assert str(error).splitlines()[1:] == ["  command: g++ x.cpp", "  log:   /tmp/log"]


def test_hierarchy():
    assert issubclass(PostconditionError, PassError)
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    assert all(issubclass(c, FxkitError) and c.__doc__ for c in classes)
    with pytest.raises(FxkitError):
        raise BuildError("expected, got")
