"""Run a construct in eager and by a tool, and tell whether anything differs."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.constructs.case import CALLS, Case, Make

Program = Callable[..., Any]


class Verdict(enum.Enum):
    """What came out of a construct."""

    ONE_GRAPH = "right, one graph"
    PIECES = "right, in pieces or in Python"
    WRONG = "silently wrong"
    REFUSED = "refused"


@dataclass(frozen=True)
class Outcome:
    """A verdict, and what led to it."""

    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Tool:
    """A way to get a graph out of a program.

    Attributes:
        name: What it is called.
        prepare: Takes a program and arguments, runs or follows it once, and returns what is called
            from then on, with a function that tells whether that is one graph.
    """

    name: str
    prepare: Callable[[Program, tuple[Any, ...]], tuple[Program, Callable[[], bool]]]


def judge(make: Make, tool: Tool) -> Outcome:
    """Run a construct five times in eager and five times by a tool; both run it once before."""
    _seed(0)
    expected = list(_observations(make(), None))
    _seed(0)
    case = make()
    seen: list[Any] = []
    is_whole: Callable[[], bool] = bool
    try:
        with _undisturbed():
            _seed(0)
            with contextlib.redirect_stdout(io.StringIO()):
                _enter(case, "A")
                program, is_whole = tool.prepare(case.fn, case.arguments("A"))
            seen.extend(_observations(case, program))
            whole = is_whole()
    except Exception as error:  # whatever a tool raises while it prepares is a refusal
        return Outcome(Verdict.REFUSED, f"{type(error).__name__}: {_first_line(error)}")
    refusal = ""
    for number, (ours, theirs) in enumerate(zip(seen, expected, strict=True)):
        difference = _difference(ours, theirs)
        if difference and ours["error"] is not None:
            refusal = refusal or f"call {number}: {ours['error']}"
        elif difference:
            return Outcome(Verdict.WRONG, f"call {number}: {difference}")
    if refusal:
        return Outcome(Verdict.REFUSED, refusal)
    return Outcome(Verdict.ONE_GRAPH if whole else Verdict.PIECES)


def _observations(case: Case, program: Program | None) -> Iterator[dict[str, Any]]:
    """Run a case and yield what each call did; with no program, the case's own, run once before."""
    with _undisturbed():
        if program is None:
            _seed(0)
            _enter(case, "A")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
                case.fn(*case.arguments("A"))
        before = "A"
        for number, kind in enumerate(CALLS):
            if kind != before:
                _enter(case, kind)
            before = kind
            _seed(number + 1)
            yield _observe(case, case.fn if program is None else program, case.arguments(kind))


def _enter(case: Case, kind: str) -> None:
    if case.change is not None:
        case.change(kind)


def _observe(case: Case, program: Program, args: tuple[Any, ...]) -> dict[str, Any]:
    seen: dict[str, Any] = {"result": None, "error": None}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            seen["result"] = _frozen(program(*args))
        except Exception as error:  # what a program raises is compared like what it returns
            seen["error"] = type(error).__name__
    seen["printed"] = printed.getvalue()
    seen["arguments"] = _frozen(args)
    seen["state"] = _frozen(case.state()) if case.state else None
    _, numpy_state, *_ = np.random.get_state()
    seen["random"] = (
        _frozen(torch.get_rng_state()),
        hash(random.getstate()),
        np.asarray(numpy_state).tobytes(),
    )
    seen["modes"] = (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    return seen


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put back the modes that constructs change."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    autocast = torch.is_autocast_enabled("cpu")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled("cpu", autocast)


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def _frozen(value: Any) -> Any:
    """Copy a nested value into tuples and plain values that can be compared."""
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        if plain.layout is torch.strided:
            plain = plain.as_subclass(torch.Tensor)
        dense = plain.to_dense() if plain.layout is not torch.strided else plain
        kind = "Parameter" if isinstance(value, torch.nn.Parameter) else ""
        return (
            "tensor",
            kind,
            str(plain.dtype),
            tuple(plain.shape),
            value.requires_grad,
            dense.clone(),
        )
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(_frozen(v) for v in vars(value).values()))
    if isinstance(value, dict):
        return (type(value).__name__, tuple(value), *map(_frozen, value.values()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(_frozen, value))
    return value


def _difference(ours: Any, theirs: Any) -> str | None:
    return next((what for what in theirs if not _same(ours[what], theirs[what])), None)


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, tuple):
        same_shape = isinstance(ours, tuple) and len(ours) == len(theirs)
        return same_shape and all(map(_same, ours, theirs))
    if isinstance(theirs, torch.Tensor):
        if type(ours) is not torch.Tensor:  # some tools leave tensors of their own behind
            return False
        return torch.equal(torch.nan_to_num(ours, 1e9), torch.nan_to_num(theirs, 1e9))
    return type(ours) is type(theirs) and (ours == theirs or ours != ours)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:120]
