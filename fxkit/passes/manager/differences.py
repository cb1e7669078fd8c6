"""In which way two programs differ, so that it can be asked again of smaller ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxkit.analysis.equivalence import assert_equivalent
from fxkit.analysis.observation import clone_inputs, quiet
from fxkit.analysis.reproducing.reduction import CountedOracle, Oracle
from fxkit.errors import NumericsError
from fxkit.torch_adapters import pytree

Args = tuple[Any, ...]


@dataclass(frozen=True)
class ProgramDifference:
    """A way to tell two programs apart.

    Attributes:
        differ: `differ(before, after, args)`: whether they do.
        statements: The same for a script that has `program`, `rewritten` and `args`.
        oracle: What the statements call `bad`, or None.
    """

    differ: Callable[[fx.GraphModule, fx.GraphModule, Args], bool]
    statements: str
    oracle: Oracle | None = None


_COMPARE = """
import copy
from torch.utils import _pytree as pytree
expected = pytree.tree_leaves(program(*copy.deepcopy(args)))
got = pytree.tree_leaves(rewritten(*copy.deepcopy(args)))
print("before:", *expected, sep="\\n")
print("after:", *got, sep="\\n")
try:
    torch.testing.assert_close(got, expected, equal_nan=True{options})
except AssertionError as error:
    print(error)
    sys.exit(1)
print("the fault is gone")
""".strip()

_EQUIVALENT = """
from fxkit.errors import NumericsError
from fxkit.testing import assert_equivalent
try:
    assert_equivalent(program, rewritten, args)
except NumericsError as error:
    print(error)
    sys.exit(1)
print("the fault is gone")
""".strip()

_ASKED = """
is_bad = bool(bad(rewritten, args))
print("the fault is there" if is_bad else "the fault is gone")
sys.exit(is_bad)
""".strip()

_EXACTLY = {"rtol": 0, "atol": 0, "check_stride": True}


def differences(bad: Oracle) -> list[ProgramDifference]:
    """Return the ways to tell two programs apart, the plainest first, an oracle's the last."""
    exactly = "".join(f", {key}={value}" for key, value in _EXACTLY.items())
    return [
        ProgramDifference(_values_differ({}), _COMPARE.format(options="")),
        ProgramDifference(_values_differ(_EXACTLY), _COMPARE.format(options=exactly)),
        ProgramDifference(_do_other_things, _EQUIVALENT),
        ProgramDifference(_judged(bad), _ASKED, bad),
    ]


def _values_differ(options: dict[str, Any]) -> Callable[..., bool]:
    def differ(before: fx.GraphModule, after: fx.GraphModule, args: Args) -> bool:
        expected = _leaves(before, args)
        try:
            got = _leaves(after, args)
            torch.testing.assert_close(got, expected, equal_nan=True, **options)
        except Exception:  # of the rewritten program, which the one before does not raise
            return True
        return False

    return differ


def _leaves(gm: fx.GraphModule, args: Args) -> list[Any]:
    state = torch.random.get_rng_state()
    try:
        return pytree.tree_leaves(quiet(copy.deepcopy(gm))(*clone_inputs(args)))
    finally:
        torch.random.set_rng_state(state)


def _do_other_things(before: fx.GraphModule, after: fx.GraphModule, args: Args) -> bool:
    try:
        assert_equivalent(copy.deepcopy(before), copy.deepcopy(after), args)
    except NumericsError:
        return True
    return False


def _judged(bad: Oracle) -> Callable[..., bool]:
    asked = CountedOracle(bad)

    def differ(before: fx.GraphModule, after: fx.GraphModule, args: Args) -> bool:
        return not asked((before, args)) and asked((after, args))

    return differ
