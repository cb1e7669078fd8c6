"""Kernels in models of transformers: each is used where it is faster, and left out where not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxkit
from fxkit.patterns.match_results import Match
from tests.architectures import HUGGING_FACE

SOURCES = Path(__file__).parent / "sources"


def top_experts(logits: Tensor) -> tuple[Tensor, Tensor]:
    shares, experts = torch.topk(F.softmax(logits, dim=-1), 2, dim=-1)
    return shares, experts


def routing() -> fxkit.authoring.kernels.AuthoredKernel:
    return fxkit.kernel(
        top_experts,
        cpp=SOURCES / "top_experts.cpp",
        numbers={"tokens": lambda logits: logits.numel() // logits.shape[-1]},
        where=lambda match: match.type("logits").shape[-1] >= 2,
        finite_only=True,  # the order of equal ones, and of those that are NaN, is nobody's
        samples=[{"logits": shape} for shape in ((5, 8), (64, 17), (0, 4), (3, 7, 2))],
    )


def cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=ignored)


def is_matrix(match: Match) -> bool:
    return len(match.type("logits").shape) == 2


def loss() -> fxkit.authoring.kernels.AuthoredKernel:
    def sample(rows: int, classes: int, ignored: int) -> dict[str, object]:
        labels = torch.arange(rows) * 5 % classes
        labels[1] = ignored
        return {"logits": (rows, classes), "labels": labels, "ignored": ignored}

    return fxkit.kernel(
        cross_entropy,
        cpp=SOURCES / "cross_entropy.cpp",
        numbers={"rows": lambda logits: logits.shape[0]},
        where=is_matrix,
        finite_only=True,
        samples=[sample(5, 1000, -100), sample(3, 7, -100), sample(2, 257, 0)],
    )


def test_the_kernels_hold() -> None:
    assert routing().prove() == 32
    assert loss().prove() > 10


def report_of(model: torch.nn.Module) -> str:
    """Compile a language model with both kernels, compare it with eager, and return the report."""
    ids = torch.arange(128).view(2, 64) * 7 % 96 + 3
    program = fxkit.compile(model, kernels=[routing(), loss()])
    with torch.no_grad():
        for _ in range(2):
            result = program(input_ids=ids, labels=ids, use_cache=False)
        expected = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(result.loss, expected.loss)
    torch.testing.assert_close(result.logits, expected.logits)
    return program.report()


def lines_of(report: str, kernel: str) -> list[str]:
    return [line for line in report.splitlines() if line.startswith(f"kernel {kernel} ")]


BOTH_TIMES = r"\d us, fxkit's kernels [\d.]+ us"


@pytest.mark.usefixtures("one_thread")
def test_one_wins_and_one_loses_in_a_mixture_of_experts() -> None:
    torch.manual_seed(0)
    model, _ = HUGGING_FACE["mixtral"]()
    model.config._experts_implementation = "batched_mm"
    report = report_of(model)
    first, second = lines_of(report, "top_experts")  # of two layers
    assert first.startswith("kernel top_experts used at softmax, topk, getitem")
    assert second.startswith("kernel top_experts used at softmax_1, topk_1, getitem")
    (lost,) = lines_of(report, "cross_entropy")  # one exponential at a time
    assert lost.startswith("kernel cross_entropy left out at cross_entropy (loss_utils.py:")
    assert lost.endswith("fxkit's own kernels are faster")
    assert all(re.search(BOTH_TIMES, line) for line in (first, second, lost))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_kernel_that_is_always_used_takes_the_place_of_a_models_loss(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, _ = HUGGING_FACE[name]()
    kernel = loss()
    monkeypatch.setattr(kernel, "always", True)
    ids = torch.arange(24).view(2, 12) * 7 % 96 + 3
    labels = ids.clone()
    labels[0, :5] = -100
    program = fxkit.compile(model, kernels=[kernel])
    with torch.no_grad():
        for _ in range(2):
            result = program(input_ids=ids, labels=labels, use_cache=False).loss
        torch.testing.assert_close(result, model(input_ids=ids, labels=labels).loss)
    assert "kernel cross_entropy used at cross_entropy" in program.report()


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_conversions_that_change_nothing_do_not_hide_a_pattern() -> None:
    kernel = fxkit.kernel(
        rms_norm,
        cpp=SOURCES / "rms_norm.cpp",
        numbers={"rows": lambda x: x.numel() // x.shape[-1]},
        where=lambda match: match.type("w").shape == match.type("x").shape[-1:],
        samples=[{"x": (2, 5, 16), "w": (16,)}, {"x": (3, 33), "w": (33,)}],
        always=True,
    )
    model, inputs = HUGGING_FACE["llama"]()
    program, given = fxkit.compile(model, kernels=[kernel]), inputs(2)
    with torch.no_grad():
        expected = model(**given).logits
        for _ in range(2):
            torch.testing.assert_close(program(**given).logits, expected)
    norms = sum("Norm" in type(module).__name__ for module in model.modules())
    assert program.report().count("kernel rms_norm used at") == norms > 2
