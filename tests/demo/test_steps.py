"""The demo from end to end: what it says, what it writes, and what it does when something lacks."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

import fxkit
from fxkit.demo import model, sentences, steps
from fxkit.demo.building import build
from fxkit.demo.journey import DemoSubject
from fxkit.lower.building import build as building
from fxkit.lower.runtime import binding


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp("demo") / "out"
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "TIMING_SECONDS", 0)
        patch.setattr(steps, "FEWEST_ROUNDS", 1)
        steps.run(out=out, write=lines.append)
    return "\n".join(lines), out


@pytest.fixture(scope="module")
def subject() -> DemoSubject:
    demo = model.load()
    texts = sentences.ALL[:8]
    return DemoSubject(texts, demo.encoder, demo.inputs(texts))


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern!r} is not in\n{text}"
    return float(found[1])


def test_every_step_has_its_heading(printed: tuple[str, Path]) -> None:
    headings = re.findall(r"^── ([\w ]+) ─", printed[0], re.MULTILINE)
    assert headings == [
        "model", "capture", "passes", "profile", "regions", "the same meaning", "time", "files",
    ]  # fmt: skip


def test_nodes_tree_passes_and_profile_are_shown(printed: tuple[str, Path]) -> None:
    text = printed[0]
    assert number(r"(\d+) nodes and [\d,]+ guards in", text) > 200
    assert "bert: BertModel" in text
    assert re.search(r"^canonicalise .*dropout_in_eval", text, re.MULTILINE)
    assert re.search(r"^aten\.linear +36 ", text, re.MULTILINE)


def test_at_least_95_percent_of_the_candidates_are_fused(printed: tuple[str, Path]) -> None:
    share = number(r"pointwise and normalising nodes \(([\d.]+) %\) run fused", printed[0])
    assert share >= 95
    is_told = re.search(r"^left to ATen +such as +because", printed[0], re.MULTILINE)
    assert share == 100 or is_told


def test_the_error_is_at_most_twice_that_of_eager(printed: tuple[str, Path]) -> None:
    assert number(r"error against float64: .*\(([\d.]+) ×\)", printed[0]) <= 2


def test_every_sentence_keeps_its_neighbours(printed: tuple[str, Path]) -> None:
    count = len(sentences.ALL)
    assert f"in the same order, for {count} of {count} sentences" in printed[0]
    assert "0.574  0.574  The forecast says it will pour near the sea" in printed[0]


def test_times_stand_beside_the_machine(printed: tuple[str, Path]) -> None:
    assert re.search(r"^eager +[\d.]+ .?s +1\.00 ×$", printed[0], re.MULTILINE)
    assert re.search(r"^fxkit +[\d.]+ .?s +[\d.]+ ×$", printed[0], re.MULTILINE)
    assert re.search(r"calls of each in turn, .* thread", printed[0])


def test_drawing_and_report_are_whole_and_offline(printed: tuple[str, Path]) -> None:
    text, out = printed
    drawing, report = (out / "graph.svg").read_text(), (out / "report.html").read_text()
    assert drawing.lstrip().startswith("<svg")
    assert "scaled_dot_product_attention" in drawing
    assert sentences.ALL[1] in report
    assert "kernels.cpp" in report
    assert not re.search(r"(src|href)=[\"']https?:", report)
    assert str(out / "report.html") in text


def test_without_a_compiler_it_says_so_and_runs_in_eager(
    subject: DemoSubject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXKIT_CXX", str(tmp_path / "no-compiler"))
    lines: list[str] = []
    captured = steps.capture(subject, lines.append)
    built = steps.lower(captured.graph_module, subject, lines.append)
    text = "\n".join(lines)
    assert "note: expected a C++ compiler, got none: looked for" in text
    assert "install g++" in text
    assert "0 of" in text
    verdict = steps.compare(subject, built, lines.append)
    assert verdict.error == verdict.eager_error


def test_a_cache_that_is_a_file_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path / "file"))
    x = torch.randn(16, 64)
    built = build(fxkit.symbolic_trace(lambda x: (x * 3 + 1).exp()), (x,))
    assert any("set FXKIT_CACHE_DIR" in note for note in built.notes)
    assert any(region.kernel for region in built.module.regions)


def test_the_empty_cache_stays_until_all_is_built_that_goes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXKIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(binding, "_loaded", [])
    monkeypatch.setattr(binding, "_started", [])
    real = building._compile

    def compile(order: building.Order, name: str, workplace: Path) -> Path:
        if order.linking == binding._linking():
            time.sleep(2)  # longer than the kernels take
        return real(order, name, workplace)

    monkeypatch.setattr(building, "_compile", compile)
    x = torch.randn(16, 64)
    built = build(fxkit.symbolic_trace(lambda x: (x * 3 + 1).exp()), (x,))
    assert built.notes == ()
    assert not any(thread.is_alive() for thread in binding._started)
