"""What programs write: to both streams and to files, with clocks and logs between, in order."""

from __future__ import annotations

import functools
import io
import logging
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxkit.tracing.captured import Captured

X = torch.linspace(-1, 1, 6).reshape(2, 3)
say = print


def _stderr(a: torch.Tensor) -> torch.Tensor:
    print("shape", tuple(a.shape), file=sys.stderr)
    return a * 2


def _spelled_out(a: torch.Tensor) -> torch.Tensor:
    print("a", 1, sep="-", end="|", file=sys.stderr, flush=True)
    print(*["b", 2.0], sep="+")
    return a * 2


def _both_streams(a: torch.Tensor) -> torch.Tensor:
    print("out")
    print("err", file=sys.stderr)
    a = a.sin()
    print("out again", file=sys.stdout)
    return a


def _tensors(a: torch.Tensor) -> torch.Tensor:
    print("sum", a.sum(), file=sys.stderr)
    return a * 2


def _numbers(a: torch.Tensor) -> torch.Tensor:
    print("sum", a.sum().item(), file=sys.stderr)
    return a * 2


def _objects(a: torch.Tensor) -> torch.Tensor:
    print({"a": a.shape}, torch.nn.ReLU(), file=sys.stderr)
    return a * 2


def _by_a_helper(a: torch.Tensor) -> torch.Tensor:
    def log(text: str) -> None:
        print("[log]", text, file=sys.stderr, flush=True)

    log(f"{a.ndim}")
    return a * 2


def _with_a_clock(a: torch.Tensor) -> torch.Tensor:
    began = time.perf_counter()
    a = a * 2
    passed = time.perf_counter() - began
    print("done" if passed >= 0 else "never", "in time" if passed < 1e9 else "late")
    return a


def _before_a_branch(a: torch.Tensor) -> torch.Tensor:
    print("begins", file=sys.stderr)
    time.time()
    print("positive" if a.sum() > 0 else "negative")
    return a * 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "fn",
    [
        *(_stderr, _spelled_out, _both_streams, _tensors, _numbers, _objects, _by_a_helper),
        *(_with_a_clock, _before_a_branch),
    ],
)
def test_texts_are_written_at_each_call(fn: Callable[..., Any], capsys: pytest.CaptureFixture[str]):
    captured = Captured(fn)
    for number in (1, 1, 2, -3, 2):
        expected = fn(X + number), capsys.readouterr()
        assert torch.equal(captured(X + number), expected[0])
        assert capsys.readouterr() == expected[1]
    assert captured.whole


def test_what_is_printed_of_a_tensor_in_an_opaque_call_is_no_guard(
    capsys: pytest.CaptureFixture[str],
):
    captured = Captured(_tensors)
    for number in range(5):
        captured(X + number)
    assert captured.whole and len(captured.graphs) == 1
    assert capsys.readouterr().err.count("sum tensor(") == 5


def test_files_of_c_and_of_python_are_printed_to():
    class Lines:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def write(self, text: str) -> None:
            self.lines.append(text)

    files = SimpleNamespace(text=io.StringIO(), lines=Lines())

    def fn(a: torch.Tensor) -> torch.Tensor:
        print("rows", a.shape[0], file=files.text)
        print("rows", a.shape[0], sep="=", end="", file=files.lines)
        return a * 2

    captured = Captured(fn)
    for _ in range(4):
        assert torch.equal(captured(X), X * 2)
    assert files.text.getvalue() == "rows 2\n" * 4
    assert files.lines.lines == ["rows", "=", "2", ""] * 4


def _partial() -> Callable[..., Any]:
    log = functools.partial(print, "partial")
    return lambda a: (log("b"), a * 2)[1]


def _mapped(a: torch.Tensor) -> torch.Tensor:
    list(map(print, ["mapped"]))
    return a * 2


def _mapped_alias(a: torch.Tensor, log: Any = print) -> torch.Tensor:
    list(map(say, ["alias"]))
    list(map(log, ["default"]))
    return a * 2


def _partial_inside(a: torch.Tensor) -> torch.Tensor:
    functools.partial(print, "inside")()
    return a * 2


@pytest.mark.parametrize("fn", [_partial(), _mapped, _mapped_alias, _partial_inside])
def test_prints_that_c_code_makes_are_not_lost(
    fn: Callable[..., Any], capsys: pytest.CaptureFixture[str]
):
    fn(X)
    expected = capsys.readouterr().out
    captured = Captured(fn)
    for _ in range(3):
        captured(X)
        assert capsys.readouterr().out == expected and expected
    assert "to what calls it unseen" in captured.explain(X)


def test_clocks_that_c_code_reads_are_not_constants():
    clock, kept = time.perf_counter, SimpleNamespace(times=defaultdict(time.perf_counter), at=0.0)

    def fn(a: torch.Tensor) -> torch.Tensor:
        kept.at = next(iter(clock, None))
        return a * 2

    def by_default(a: torch.Tensor) -> torch.Tensor:
        kept.at = kept.times.pop("a", None) or kept.times["a"]
        return a * 2

    for program in (fn, by_default):
        captured, seen = Captured(program), set()
        for _ in range(4):
            captured(X)
            kept.times.clear()
            seen.add(kept.at)
        assert len(seen) == 4


def test_a_function_that_is_only_called_may_stand_beside_sorted(
    capsys: pytest.CaptureFixture[str],
):
    def fn(a: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        print(max(a.shape), sorted([2, 1]))
        return a * (began > 0)

    captured = Captured(fn)
    for _ in range(3):
        captured(X)
    assert captured.whole and capsys.readouterr().out == "3 [1, 2]\n" * 3


def test_callers_are_seen_as_they_are_where_calls_are_hooked():
    log = logging.getLogger("fxkit.tests.hooked")
    log.propagate = False
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(filename)s %(funcName)s %(message)s"))
    log.addHandler(handler)
    seen = []

    def helper() -> None:
        seen.append(sys._getframe(1).f_code.co_name)
        warnings.warn("careful", stacklevel=2)

    def fn(a: torch.Tensor) -> torch.Tensor:
        time.perf_counter()
        log.info("always")
        log.debug("at times")
        helper()
        return a * 2

    captured = Captured(fn)
    for level in (logging.INFO, logging.INFO, logging.DEBUG, logging.DEBUG):
        log.setLevel(level)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            captured(X)
        assert [(it.filename, it.lineno) for it in caught] == [
            (__file__, fn.__code__.co_firstlineno + 4)
        ]
    assert seen == ["fn"] * 4
    always, at_times = "test_printing.py fn always\n", "test_printing.py fn at times\n"
    assert stream.getvalue() == always * 2 + (always + at_times) * 2


def test_a_choice_as_the_last_argument_of_a_hooked_call():
    def fn(a: torch.Tensor, flag: bool) -> torch.Tensor:
        time.perf_counter()
        a = torch.add(a, 1 if flag else 2)
        return torch.mul(input=a, other=3 if flag else 4)

    captured = Captured(fn)
    for flag in (True, True, False, False):
        assert torch.equal(captured(X, flag), fn(X, flag))
    assert captured.whole
