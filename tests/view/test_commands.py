"""The commands that look: what they print and write, and limits for continuous integration."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from fxkit import cli
from fxkit.errors import UnsupportedError
from fxkit.view import Profile
from fxkit.view.differences.gates import parse_gate
from fxkit.view.texts.terminal import Terminal


def export(path: Path, *more: torch.nn.Module) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), *more).eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 4),)), path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("exported")
    small = export(folder / "small.pt2")
    return str(small), str(export(folder / "large.pt2", torch.nn.LayerNorm(8)))


def test_two_programs_are_compared(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["diff", *files]) == 0
    text = capsys.readouterr().out
    assert "added" in text
    assert "aten.layer_norm" in text
    assert cli.main(["diff", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["added"] == 3
    assert cli.main(["diff", *files, "-o", str(tmp_path / "d.html")]) == 0
    assert "fx-viewer" in (tmp_path / "d.html").read_text()
    assert cli.main(["diff", *files, "-o", str(tmp_path / "d.csv")]) == 1


def test_a_limit_fails_the_command(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["diff", *files, "--fail-if", "nodes>+5%"]) == 1
    error = capsys.readouterr().err
    assert re.search(r"fxkit diff: nodes>\+5% holds: nodes \d+ → \d+ \(\+\d", error)
    assert cli.main(["diff", *files, "--fail-if", "nodes>+500%", "--fail-if", "flops>1e9"]) == 0
    assert cli.main(["diff", *reversed(files), "--fail-if", "nodes>+5%"]) == 0
    assert cli.main(["diff", *files, "--fail-if", "nodes bigger"]) == 1
    assert "expected a limit such as 'nodes>+5%'" in capsys.readouterr().err
    assert cli.main(["diff", *files, "--fail-if", "time>1"]) == 1
    assert "expected time to be known" in capsys.readouterr().err


def test_a_profile_is_compared_with_an_earlier_one(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = str(tmp_path / "profile.json")
    quick = ["--iters", "2"]
    assert cli.main(["profile", files[0], *quick, "-o", earlier]) == 0
    read = Profile.from_dict(json.loads(Path(earlier).read_text()))
    assert {"aten.linear", "aten.gelu"} <= {row.operator for row in read.rows}
    assert cli.main(["profile", files[1], *quick, "--baseline", earlier, "--by", "op"]) == 0
    assert re.search(r"nodes: \d → \d \(\+\d", capsys.readouterr().out)
    assert (
        cli.main(["profile", files[1], *quick, "--baseline", earlier, "--fail-if", "memory>=0"])
        == 1
    )
    assert cli.main(["profile", files[1], *quick, "--fail-if", "time>+5%"]) == 1
    assert "a change needs something to compare with" in capsys.readouterr().err
    Path(earlier).write_text('{"version": 0}')
    assert cli.main(["profile", files[1], *quick, "--baseline", earlier]) == 1
    assert "expected a profile of version" in capsys.readouterr().err


def test_a_trace_is_written(files: tuple[str, str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    assert cli.main(["profile", files[0], "--iters", "1", "--trace", str(trace)]) == 0
    assert any(event["name"] == "gelu" for event in json.loads(trace.read_text())["traceEvents"])


def test_a_report_tells_all(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.html"
    assert cli.main(["report", files[1], "-o", str(path), "--iters", "2"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    page = path.read_text()
    for title in ("Modules", "Passes", "Pass by pass", "Fused regions", "Where the time goes"):
        assert f"<h2>{title}</h2>" in page
    assert "against float64" in page


def test_a_tree_is_written_and_a_drawing_printed(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (
        ("t.html", "<!DOCTYPE"),
        ("t.json", '{"version"'),
        ("t.txt", "GraphModule"),
    ):
        assert cli.main(["tree", files[0], "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(words)
    capsys.readouterr()
    assert cli.main(["draw", files[0], "--json", "--colour", "flops"]) == 0
    assert json.loads(capsys.readouterr().out)["colour"] == "flops"
    assert cli.main(["draw", files[0], "--json", "--color", "bytes"]) == 0
    assert json.loads(capsys.readouterr().out)["colour"] == "bytes"


def test_limits_are_read() -> None:
    gate = parse_gate(" bytes >= 1e9 ")
    assert (gate.measure, gate.sign, gate.limit, gate.is_change) == ("bytes", ">=", 1e9, False)
    assert parse_gate("nodes<-3").failure({"nodes": 10}, {"nodes": 8}) is None
    assert parse_gate("nodes<-1").failure({"nodes": 10}, {"nodes": 8}) == (
        "nodes<-1 holds: nodes 10 → 8 (-20.0 %)"
    )
    assert parse_gate("time>=+5%").failure({"time": 1.0}, {"time": 1.05 + 1e-12})
    with pytest.raises(UnsupportedError):
        parse_gate("cost>5")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    pipe, screen = io.StringIO(), Screen()
    for stream in (pipe, screen):
        terminal = Terminal(stream)
        with terminal.working("measuring"):
            terminal.difference("1 added\n+ %relu: [b]x[/b]\n  - %a\n")
            terminal.table(["node", "time"], [["[red]a", "1 ms"]], align="<>")
    assert "\x1b" not in pipe.getvalue()
    assert "[red]a" in pipe.getvalue()
    assert "\x1b" in screen.getvalue()
    assert "[b]x[/b]" in screen.getvalue()
    assert "[red]a" in screen.getvalue()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert not Terminal(Screen()).is_rich
