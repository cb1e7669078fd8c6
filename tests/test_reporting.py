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
from fxkit.lower.training.training_module import to_cpp_training

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
    assert without == [
        "Summary", "Fused regions", "Graph", "Modules", "Generated code", "Environment",
    ]  # fmt: skip
    found = sections(fxkit.report(compiled, tmp_path / "x.html", ARGS, iters=2))
    assert found == [*without[:2], "Where the time goes", *without[2:]]


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x * self.scale) + torch.sigmoid(x)
        return (torch.sin(y) * torch.exp(-y * y)).sum()


def test_a_training_module_tells_forward_and_backward(tmp_path: Path) -> None:
    x = torch.randn(512, 512)
    trained = to_cpp_training(fxkit.capture(Trained(), (x,)).graph_module, (x,))
    path = fxkit.report(trained, tmp_path / "x.html")
    assert sections(path)[:3] == ["Summary", "Forward", "Backward"]
    assert "as kernels" in path.read_text(encoding="utf-8")


def test_a_training_module_that_eager_runs_says_why(tmp_path: Path) -> None:
    x = torch.ones(2)
    gm = fxkit.capture(lambda x: x + 1, (x,)).graph_module
    path = fxkit.report(to_cpp_training(gm, (x,)), tmp_path / "x.html")
    assert "Forward" not in sections(path)
    assert "Left to eager: its kernels save less" in path.read_text(encoding="utf-8")


def test_the_kind_of_each_kernel_is_told(tmp_path: Path) -> None:
    class Program(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.softmax(x.sin(), -1), torch.exp(x.T).cos()

    x = torch.randn(256, 128)
    compiled = fxkit.lower.to_cpp(fxkit.capture(Program(), (x,)).graph_module, (x,))
    page = fxkit.report(compiled, tmp_path / "x.html").read_text(encoding="utf-8")
    assert "rows: reductions with the work around them" in page
    assert "element by element" in page


def test_a_compiled_program_is_reported_once_it_was_called(tmp_path: Path) -> None:
    fast = fxkit.compile(model())
    with pytest.raises(UnsupportedError, match="expected a compiled program that has been called"):
        fxkit.report(fast, tmp_path / "x.html")
    measured = sections(fxkit.report(fast, tmp_path / "x.html", ARGS, iters=2))
    assert measured[:3] == ["Summary", "Fused regions", "Where the time goes"]
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
    assert {"Passes", "Fused regions", "Where the time goes", "Numerical errors"} <= set(found)
    assert torch.equal(subject(*ARGS), before)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (3, "expected a PassResult, a CompiledModule, a TrainingModule, a Compiled, a Profile or"),
        (nn.ReLU(), "expected inputs to measure ReLU with, got none"),
    ],
)
def test_what_it_can_not_report_is_refused(subject: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        fxkit.report(subject, tmp_path / "x.html")
    assert not list(tmp_path.iterdir())
