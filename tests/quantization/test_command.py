"""`python -m fxkit quantize`: files in, a report and a file out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fxkit.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export about itself


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).eval()


@pytest.fixture
def saved(tmp_path: Path, model: nn.Module) -> Path:
    exported = torch.export.export(model, (torch.randn(4, 128),))
    torch.export.save(exported, tmp_path / "model.pt2")
    return tmp_path / "model.pt2"


@pytest.mark.parametrize(
    "spec",
    [
        *("int8_static", "int8_dynamic", "int8_weight_only"),
        *("float8_weight_only", "bfloat16_weight_only"),
    ],
)
def test_a_file_is_quantised_into_another(
    spec: str, saved: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    output = saved.with_name("small.pt2")
    assert main(["quantize", str(saved), "-o", str(output), "--spec", spec]) == 0
    told = capsys.readouterr().out
    assert "2 of 2 operators quantised" in told and str(output) in told
    assert ("ranges are those of the example inputs" in told) == (spec == "int8_static")
    found: Any = torch.export.load(output).module()
    x = torch.randn(4, 128)
    torch.testing.assert_close(found(x), model(x), atol=0.1, rtol=0.1)
    assert output.stat().st_size < 0.6 * saved.stat().st_size


def test_sizes_that_vary_go_on_to_vary(tmp_path: Path, model: nn.Module) -> None:
    sizes = ({0: torch.export.Dim("batch", min=1, max=512)},)
    exported = torch.export.export(model, (torch.randn(16, 128),), dynamic_shapes=sizes)
    torch.export.save(exported, tmp_path / "model.pt2")
    output = tmp_path / "small.pt2"
    assert main(["quantize", str(tmp_path / "model.pt2"), "-o", str(output)]) == 0
    found = torch.export.load(output)
    (bounds,) = found.range_constraints.values()
    assert (int(bounds.lower), int(bounds.upper)) == (1, 512)
    x = torch.randn(5, 128)
    torch.testing.assert_close(found.module()(x), model(x), atol=0.1, rtol=0.1)


def test_batches_of_files_calibrate(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = saved.with_name("batch.safetensors")
    save_file({"input": torch.full((4, 128), 3.0)}, data)
    assert main(["quantize", str(saved), "--data", str(data)]) == 0
    assert "[3, 3]" in capsys.readouterr().out


def test_batches_that_do_not_fit_are_refused(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = saved.with_name("batch.safetensors")
    save_file({"other": torch.zeros(4, 128)}, data)
    assert main(["quantize", str(saved), "--data", str(data)]) == 1
    assert "expected tensors named ['input']" in capsys.readouterr().err
    data.write_bytes(b"no tensors")
    assert main(["quantize", str(saved), "--data", str(data)]) == 1
    assert "expected a file of safetensors" in capsys.readouterr().err


def test_what_was_written_is_read_in_another_process(saved: Path, python: list[str]) -> None:
    output = saved.with_name("small.pt2")
    assert main(["quantize", str(saved), "-o", str(output)]) == 0
    command = [*python, "-m", "fxkit", "tree", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.full((4, 128), torch.nan), "activations that are finite in calibration"),
        (torch.zeros(4, 127), r"a batch that the program takes, got \(f32\[4,127\]\)"),
        (torch.zeros(4, 128, dtype=torch.int64), r"that the program takes, got \(i64\[4,128\]\)"),
        (torch.zeros(0, 128), "some batches first, which are not empty"),
    ],
)
def test_values_that_do_not_fit_are_told(
    values: torch.Tensor, expected: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = saved.with_name("batch.safetensors"), saved.with_name("small.pt2")
    save_file({"input": values}, data)
    assert main(["quantize", str(saved), "--data", str(data), "-o", str(output)]) == 1
    assert re.search(expected, capsys.readouterr().err) and not output.exists()


def test_a_file_of_data_that_is_not_there_is_told(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(saved), "--data", str(saved.with_name("none"))]) == 1
    assert "expected a file of safetensors, got" in capsys.readouterr().err


def test_groups_of_4_bits_have_a_size(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["quantize", str(saved), "--group-size", "32"]
    assert main([*run, "--spec", "int4_weight_only"]) == 0
    assert "per_group 32" in capsys.readouterr().out
    assert main(run) == 1
    assert "expected --group-size with weights of 4 bits" in capsys.readouterr().err
    assert main([*run[:-1], "0", "--spec", "int4_dynamic"]) == 1
    assert "at least 2" in capsys.readouterr().err
