"""`fxkit.report` writes one offline page, with the sections that its subject has something for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import fxkit
from fxkit.errors import UnsupportedError

ARGS = (torch.linspace(-1, 1, 24).view(3, 8),)


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.GELU(), nn.LayerNorm(8))
    return layers.eval().requires_grad_(False)


def graph() -> fx.GraphModule:
    return fxkit.capture(model(), ARGS).graph_module


def sections(path: Path) -> list[str]:
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=[\"']https?:", page)
    return re.findall(r"<h2>(.*?)</h2>", page)


def test_a_run_of_passes(tmp_path: Path) -> None:
    result = fxkit.PassManager([fxkit.passes.Canonicalise()]).run(graph())
    path = fxkit.report(result, tmp_path / "x.html", title="one run")
    assert sections(path) == [
        "Passes", "Pass by pass", "Changes", "Modules", "Generated code", "Environment",
    ]  # fmt: skip
    page = path.read_text(encoding="utf-8")
    assert "<h1>one run</h1>" in page
    assert "dropout_in_eval × 1" in page


def test_a_compiled_module_has_a_profile_only_with_inputs(tmp_path: Path) -> None:
    compiled = fxkit.lower.to_cpp(graph(), ARGS)
    without = sections(fxkit.report(compiled, tmp_path / "x.html"))
    assert without == ["Fused regions", "Graph", "Modules", "Generated code", "Environment"]
    found = sections(fxkit.report(compiled, tmp_path / "x.html", ARGS, iters=2))
    assert found == [without[0], "Where the time goes", *without[1:]]


def test_a_compiled_program_is_reported_once_it_was_called(tmp_path: Path) -> None:
    fast = fxkit.compile(model())
    with pytest.raises(UnsupportedError, match="expected a compiled program that has been called"):
        fxkit.report(fast, tmp_path / "x.html")
    measured = sections(fxkit.report(fast, tmp_path / "x.html", ARGS, iters=2))
    assert measured[:2] == ["Fused regions", "Where the time goes"]
    assert "Where the time goes" not in sections(fxkit.report(fast, tmp_path / "x.html"))


def test_a_run_of_passes_writes_its_own_report(tmp_path: Path) -> None:
    result = fxkit.PassManager([fxkit.passes.Canonicalise()]).run(graph())
    path = result.report(tmp_path / "x.html", title="its own")
    assert "<h1>its own</h1>" in path.read_text(encoding="utf-8")


def test_a_profile(tmp_path: Path) -> None:
    profile = fxkit.profile(graph(), ARGS, warmup=0, iters=2)
    path = fxkit.report(profile, tmp_path / "x.html")
    assert sections(path) == ["Where the time goes", "Limits and memory", "Environment"]
    assert "aten.linear" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("make", [model, graph])
def test_a_module_goes_through_everything_and_stays_as_it_is(make: Any, tmp_path: Path) -> None:
    subject = make()
    before = subject(*ARGS)
    found = sections(fxkit.report(subject, tmp_path / "x.html", ARGS, iters=2))
    assert {"Passes", "Fused regions", "Where the time goes", "Errors"} <= set(found)
    assert torch.equal(subject(*ARGS), before)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (3, "expected a PassResult, a CompiledModule, a Compiled, a Profile or a module, got int"),
        (nn.ReLU(), "expected inputs to measure ReLU with, got none"),
    ],
)
def test_what_it_can_not_report_is_refused(subject: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        fxkit.report(subject, tmp_path / "x.html")
    assert not list(tmp_path.iterdir())
