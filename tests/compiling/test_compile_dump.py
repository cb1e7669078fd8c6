"""Instruments of a compile, and the folder that every stage is written to."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.functional import gelu, layer_norm

import fxkit
from fxkit.errors import PassError, UnsupportedError
from fxkit.lower.compiling.pipeline import LOWERING_STEPS
from fxkit.passes import Instrument, Pass, PrintAfter
from fxkit.passes.manager.records import PassRecord

X = torch.randn(8, 64)


def program(x: torch.Tensor) -> torch.Tensor:
    return gelu(layer_norm(x * 1, (64,)))


def run(fn: Any, *args: torch.Tensor) -> Any:
    with torch.no_grad():
        return fn(*args)


class Stages(Instrument):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, gm: fx.GraphModule) -> None:
        self.seen.append("begin")

    def after(self, current: Pass, record: PassRecord, gm: fx.GraphModule) -> None:
        self.seen.append(current.name)

    def after_step(self, step: Any, state: Any, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append(step.name)


def test_instruments_see_the_passes_and_the_steps_in_order() -> None:
    stages = Stages()
    run(fxkit.compile(program, instruments=[stages]), X)
    passes = [one.name for one in fxkit.passes.pipelines.LOWERING]
    assert stages.seen == ["begin", *passes, *(step.name for step in LOWERING_STEPS)]


def test_instruments_see_a_backward() -> None:
    stages = Stages()
    x = X.clone().requires_grad_()
    fxkit.compile(program, instruments=[stages])(x).sum().backward()
    assert stages.seen.count("partition") == 2


def test_steps_are_printed_by_name() -> None:
    file = io.StringIO()
    printer = PrintAfter(frozenset(["partition", "canonicalise"]), file)
    run(fxkit.compile(program, instruments=[printer]), X)
    text = file.getvalue()
    assert "after canonicalise (3/10):\ngraph(%x" in text
    assert "after partition:\nregion of layer_norm, gelu" in text


def test_what_is_no_instrument_is_refused() -> None:
    with pytest.raises(PassError, match="expected instruments, got int"):
        fxkit.compile(program, instruments=[1])  # type: ignore[list-item]


def test_every_stage_is_a_file_in_the_order_of_the_pipeline(tmp_path: Path) -> None:
    compiled = fxkit.compile(program, dump=tmp_path / "dump")
    assert torch.allclose(run(compiled, X), program(X), atol=1e-6)
    (folder,) = (tmp_path / "dump").iterdir()
    files = sorted(path.name for path in folder.iterdir() if path.name != "index.txt")
    stages = [name.partition("_")[2].removesuffix(".txt") for name in files]
    assert stages[:2] == ["captured_graph", "pass_canonicalise"]
    steps = {step.name for step in LOWERING_STEPS}
    expected = ["infer_types", "partition", "plan", "build", "assemble"]
    assert [stage for stage in stages if stage in steps] == expected
    assert stages[-1] == "kernel_0"
    texts = {stage: (folder / file).read_text() for stage, file in zip(stages, files, strict=True)}
    assert "test_compile_dump.py" in texts["captured_graph"]
    assert "multiply_by_one" in texts["pass_canonicalise"]
    assert "region of layer_norm, gelu" in texts["partition"]
    assert 'extern "C"' in texts["build"]
    for part in ("nodes of region_0", "loop IR", "schedule", "sweep 0", "text", "built: "):
        assert part in texts["kernel_0"]
    index = (folder / "index.txt").read_text()
    assert all(file in index for file in files)
    assert "dead_code_elimination (8/10): no change" in index


def test_each_graph_gets_a_folder_and_nothing_is_written_when_it_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FXKIT_DUMP", str(tmp_path / "dump"))
    compiled = fxkit.compile(program, dynamic=False)
    run(compiled, X)
    run(compiled, X[:4])
    assert sorted(p.name for p in (tmp_path / "dump").iterdir()) == ["graph_0000", "graph_0001"]
    monkeypatch.delenv("FXKIT_DUMP")
    run(compiled, X[:2])
    assert len(list((tmp_path / "dump").iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]


def test_a_file_in_place_of_the_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dump").touch()
    monkeypatch.setenv("FXKIT_DUMP", str(tmp_path / "dump"))
    with pytest.raises(UnsupportedError, match=r"expected a folder .*/dump': file exists"):
        run(fxkit.compile(program), X)


class _Raises(Instrument):
    def after_step(self, step: Any, state: Any, seconds: float) -> None:
        raise ValueError("no room")


@pytest.mark.filterwarnings("error")
def test_an_instrument_that_raises_is_named() -> None:
    with pytest.raises(PassError, match=r"_Raises\.after_step to return, got ValueError: no room"):
        run(fxkit.compile(lambda x: x * 2 + 1, instruments=[_Raises()]), X)
