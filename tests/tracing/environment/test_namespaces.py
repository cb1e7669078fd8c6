"""Names that lie in modules: those that arrive late, the interpreter's, and torch's own."""

from __future__ import annotations

import builtins
import math
import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxkit.tracing.captured import Captured

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def _follows(captured: Captured) -> None:
    for _ in range(2):
        assert torch.equal(captured(X), captured.fn(X))
    assert captured.whole


def _module(**values: Any) -> types.ModuleType:
    module = types.ModuleType("settings")
    vars(module).update(values)
    return module


def _asked(module: types.ModuleType) -> Any:
    return lambda a: a * getattr(module, "gain", 1.0)


def _tested(module: types.ModuleType) -> Any:
    return lambda a: a * module.gain if hasattr(module, "gain") else a


def _tried(module: types.ModuleType) -> Any:
    def fn(a: Any) -> Any:
        try:
            return a * module.gain
        except AttributeError:
            return a

    return fn


@pytest.mark.parametrize("program", [_asked, _tested, _tried])
@pytest.mark.parametrize("late", ["gain", "__getattr__"])
def test_what_a_module_lacked_is_seen_when_it_arrives(program: Any, late: str):
    module = _module()
    captured = Captured(program(module))
    _follows(captured)
    setattr(module, late, 3.0 if late == "gain" else lambda name: 3.0)
    assert torch.equal(captured.fn(X), X * 3)
    _follows(captured)
    delattr(module, late)
    _follows(captured)


def test_names_of_a_module_that_are_computed():
    module, which = _module(gain_a=2.0, gain_b=3.0), ["a"]
    captured = Captured(lambda a: a * getattr(module, "gain_" + which[0]))
    _follows(captured)
    module.gain_a = 5.0
    _follows(captured)
    which[0] = "b"
    _follows(captured)
    module.gain_b = 7.0
    _follows(captured)


@pytest.mark.parametrize(
    "read",
    [
        lambda module: vars(module).get("gain", 1.0),
        lambda module: module.__dict__.get("gain", 1.0),
        lambda module: len([name for name in dir(module) if not name.startswith("_")]),
    ],
)
def test_all_names_of_a_module(read: Any):
    module = _module()
    captured = Captured(lambda a: a * read(module))
    _follows(captured)
    module.gain = 3.0
    _follows(captured)
    assert captured.recaptures == 1


def test_names_of_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builtins, "gain_of_all", [2.0], raising=False)
    captured = Captured(lambda a: a * gain_of_all[0] * divmod(7, 2)[0])  # type: ignore[name-defined] # noqa: F821
    _follows(captured)
    builtins.gain_of_all[0] = 4.0  # type: ignore[attr-defined]
    _follows(captured)
    monkeypatch.setattr(builtins, "divmod", lambda a, b: (9, 9))
    assert torch.equal(captured.fn(X), X * 36)
    _follows(captured)


def test_modules_that_are_imported_inside(monkeypatch: pytest.MonkeyPatch):
    def fn(a: Any) -> Any:
        try:
            import fxkit_test_settings  # type: ignore[import-not-found]
        except ImportError:
            return a
        return a * fxkit_test_settings.gain

    captured = Captured(fn)
    for gain in (2.0, 3.0):
        monkeypatch.setitem(sys.modules, "fxkit_test_settings", _module(gain=gain))
        _follows(captured)
    monkeypatch.delitem(sys.modules, "fxkit_test_settings")
    assert torch.equal(captured(X), X)


def test_the_first_import_is_no_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    (tmp_path / "fxkit_test_lazy.py").write_text("gain = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def fn(a: Any) -> Any:
        import fxkit_test_lazy  # type: ignore[import-not-found]

        return a * fxkit_test_lazy.gain

    captured = Captured(fn)
    try:
        captured(X)
        recaptures = captured.recaptures
        _follows(captured)
        assert captured.recaptures - recaptures <= 1
    finally:
        sys.modules.pop("fxkit_test_lazy", None)


def _doubled(*args: Any, **kwargs: Any) -> Any:
    return args[0] * 2


@pytest.mark.parametrize(
    ("fn", "owner", "name"),
    [
        (lambda a: F.relu(a), F, "relu"),
        (lambda a: torch.nn.functional.relu(a), F, "relu"),
        (lambda a: torch.sin(a), torch, "sin"),
        (lambda a: a.relu() + 1, torch.Tensor, "relu"),
        (nn.Sequential(nn.GELU(), nn.ReLU()), F, "relu"),
        (nn.Sequential(nn.ReLU()), nn.ReLU, "forward"),
        (nn.Sequential(nn.ReLU()), nn.Module, "__call__"),
    ],
)
def test_a_function_of_torch_that_is_exchanged(
    fn: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
):
    captured = Captured(fn)
    _follows(captured)
    before = fn(X)
    with monkeypatch.context() as patch:
        change = (lambda self, *args: args[0] * 2) if isinstance(owner, type) else _doubled
        patch.setattr(owner, name, _doubled if owner is torch.Tensor else change)
        assert not torch.equal(fn(X), before)
        _follows(captured)
    _follows(captured)
    assert captured.recaptures == 1


def test_a_method_that_tensors_get(monkeypatch: pytest.MonkeyPatch):
    captured = Captured(lambda a: a.twice() if hasattr(a, "twice") else a)
    _follows(captured)
    for factor in (2, 3):
        change = lambda self, k=factor: self * k  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "twice", change, raising=False)
        _follows(captured)


def test_constants_of_trusted_modules(monkeypatch: pytest.MonkeyPatch):
    captured = Captured(lambda a: a * math.pi)
    _follows(captured)
    monkeypatch.setattr(math, "pi", 3.0)
    _follows(captured)


def test_names_that_no_code_reads_cost_no_capture():
    module = _module(gain=2.0)
    captured = Captured(lambda a: a * module.gain)
    _follows(captured)
    for number in range(4):
        module.other = number
        _follows(captured)
    assert captured.recaptures == 0
