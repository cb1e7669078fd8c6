"""A kernel that can't be made costs its own region only, with one warning that names it."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

import fxkit
from fxkit.lower import cpp_printer, to_cpp
from fxkit.lower.codegen.cpp import vector_math
from fxkit.lower.compiling import kernel_cache
from fxkit.lower.fusion import kernel_faults
from fxkit.lower.operators import scalar_ops
from fxkit.lower.training import training_module

NAMES = ("tanh", "erf", "sin", "exp", "atan", "log1p", "expm1", "cos")
KINDS = ("text", "symbol", "printer", "row")


class Wanted(Exception):
    """Raised on purpose."""


@pytest.fixture(autouse=True)
def _warns_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_faults, "_warned", set())


def program_of(names: Iterable[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a program of one region for each function, apart since torch sorts in between."""

    def program(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = (getattr(torch, name)(x.abs() + 0.5) * 0.3).sort(-1).values
        return x

    return program


@contextmanager
def spoilt(kind: str, *names: str) -> Iterator[None]:
    """Let the kernels with some functions fail: text, missing symbol, printer or operator's row."""
    print_kernel = cpp_printer.print_kernel

    def printed(kernel: Any, name: str) -> str:
        text = print_kernel(kernel, name)
        if not any(instruction.op in names for instruction in kernel.body):
            return text
        if kind == "printer":
            raise Wanted(f"no text for {names}")
        if kind == "text":
            return f"{text}\nno C++"
        lacks = f'extern "C" void fx_nowhere(); void (*{name}_lacks)() = fx_nowhere;'
        return f"{text}\n{lacks}"

    def build(*_: Any, **__: Any) -> Any:
        raise Wanted("no row")

    with pytest.MonkeyPatch.context() as patch:
        if kind == "row":
            for name in names:
                row = scalar_ops.TABLE[f"aten.{name}"]
                patch.setitem(scalar_ops.TABLE, row.name, replace(row, build=build))
        else:
            patch.setattr(cpp_printer, "print_kernel", printed)
            patch.setattr(kernel_cache, "print_kernel", printed)
        yield


@contextmanager
def one_warning(*names: str) -> Iterator[None]:
    """Expect one warning, which names the nodes of some functions and no others."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    (warning,) = caught
    told = str(warning.message)
    assert {name for name in NAMES if re.search(rf"%{name}\b", told)} == set(names), told
    assert "test_kernel_faults.py" in told and "Please report it" in told


def check_only(names: Iterable[str], module: Any) -> None:
    """See that just the regions with some functions have no kernel."""
    lost = [r for r in module.regions if any(name in r.nodes for name in names)]
    kept = [r for r in module.regions if any(n in NAMES for n in r.nodes) and r not in lost]
    assert lost and all(r.kernel is None and r.reason for r in lost)
    assert kept and all(r.kernel is not None for r in kept)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [(0,), (1,), (2,), (0, 2), (0, 1)])
def test_only_the_regions_at_fault_are_left_out(kind: str, at: tuple[int, ...]) -> None:
    names = ("tanh", "erf", "sin")
    program, faulty = program_of(names), [names[place] for place in at]
    x = torch.randn(64, 48)
    with torch.no_grad(), spoilt(kind, *faulty), one_warning(*faulty):
        compiled = fxkit.compile(program)
        torch.testing.assert_close(compiled(x), program(x))
        torch.testing.assert_close(compiled(x), program(x))
    (module,) = compiled.compiled_modules
    check_only(faulty, module)
    assert module.report().calls == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_that_change_warn_once(kind: str) -> None:
    program = program_of(("tanh", "erf", "sin"))
    with torch.no_grad(), spoilt(kind, "erf"), one_warning("erf"):
        compiled = fxkit.compile(program)
        for rows in (40, 41, 64, 80):
            x = torch.randn(rows, 48)
            torch.testing.assert_close(compiled(x), program(x))
    for module in compiled.compiled_modules:
        check_only(["erf"], module)


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_in_training(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_module, "CALL_SECONDS", -1.0)  # every kernel pays
    program = program_of(("tanh", "atan", "sin"))
    x = torch.randn(64, 48, requires_grad=True)
    with spoilt(kind, "atan"), one_warning("atan"):
        compiled = fxkit.compile(program)
        result = compiled(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
    (module,) = compiled.compiled_modules
    check_only(["atan"], module)
    torch.testing.assert_close(result, program(x))
    torch.testing.assert_close(gradient, torch.autograd.grad(program(x).sum(), x)[0])


def test_the_text_of_a_function_that_the_compiler_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    definitions = vector_math.definitions

    def spoilt_definitions(names: Any) -> str:
        return definitions(names).replace("float fx_tanh(", "no fx_tanh(")

    monkeypatch.setattr(vector_math, "definitions", spoilt_definitions)
    program, x = program_of(("tanh", "erf")), torch.randn(64, 48)
    with torch.no_grad(), one_warning("tanh"):
        compiled = fxkit.compile(program)
        torch.testing.assert_close(compiled(x), program(x))
    check_only(["tanh"], compiled.compiled_modules[0])


@pytest.mark.parametrize("kind", ["text", "printer"])
def test_where_every_kernel_fails_the_graph_runs_in_eager(kind: str) -> None:
    program, x = program_of(("tanh", "erf")), torch.randn(64, 48)
    gm = fx.symbolic_trace(program)
    with spoilt(kind, "tanh", "erf"), pytest.warns(UserWarning, match="2 regions have none"):
        module = to_cpp(gm, (x,))
    torch.testing.assert_close(module(x), program(x))
    assert module.report().calls == 0 and not module.has_kernels
    assert all(region.reason for region in module.regions)


def test_the_compilers_first_error_and_its_log_are_shown() -> None:
    gm = fx.symbolic_trace(program_of(("tanh", "erf")))
    with spoilt("text", "tanh"), pytest.warns(UserWarning) as caught:
        to_cpp(gm, (torch.randn(64, 48),))
    told = str(caught[0].message)
    assert "main.cpp:" in told and "error: " in told and "log: " in told


def check_random_program(seed: int) -> None:
    choices = random.Random(seed)
    torch.manual_seed(seed)
    names = choices.sample(NAMES, choices.randint(2, 5))
    faulty = choices.sample(names, choices.randint(1, min(2, len(names) - 1)))
    program, kind = program_of(names), choices.choice(KINDS)
    sizes = [(choices.randint(3, 70), choices.randint(3, 70)) for _ in range(3)]
    with torch.no_grad(), spoilt(kind, *faulty), one_warning(*faulty):
        compiled = fxkit.compile(program, dynamic=choices.choice([None, True]))
        for size in sizes:
            x = torch.randn(size)
            torch.testing.assert_close(compiled(x), program(x))


@pytest.mark.sweep
def test_random_programs_with_faulty_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(150):
        monkeypatch.setattr(kernel_faults, "_warned", set())
        check_random_program(seed)
