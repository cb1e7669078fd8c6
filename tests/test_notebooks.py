"""Each notebook runs from top to bottom and gives the outputs that are stored in it.

`python -m tests.test_notebooks --update` runs them and stores their outputs anew.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests import forked_programs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what jupyter's packages say of each other
    import nbclient
    import nbformat
    from jupyter_client.manager import AsyncKernelManager

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

_LINE = re.compile(r"(\.py):\d+")


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def with_kernels(python: list[str]) -> Iterator[list[str]]:
    """What stands in place of `python`, where what runs kernels is imported already, as on the
    processor whose output the notebooks show."""
    with forked_programs.serving(
        "ipykernel.kernelapp", "tests.documented_processor", python=python
    ) as command:
        yield command


def kernels(python: list[str]) -> type[AsyncKernelManager]:
    """Return what starts kernels by a command that stands in place of `python`."""

    class Kernels(AsyncKernelManager):
        def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
            _, *arguments = super().format_kernel_cmd(extra_arguments)
            return [*python, *arguments]

    return Kernels


def executed(notebook: Any, folder: Path, python: list[str]) -> Any:
    """Return a copy of a notebook, run in a new kernel in a folder of its own."""
    fresh = nbformat.from_dict(notebook)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = nbclient.NotebookClient(
        fresh,
        timeout=120,
        kernel_name="python3",
        kernel_manager_class=kernels(python),
        extra_arguments=["--log-level=CRITICAL"],
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    with warnings.catch_warnings(), mock.patch.dict(os.environ, {"JUPYTER_PLATFORM_DIRS": "1"}):
        warnings.simplefilter("ignore")
        client.execute()
    return fresh


def shown(notebook: Any) -> list[str]:
    """Return each code cell with all that is shown below it, as text.

    Line numbers are left out: those of torch and of model libraries move with their versions.
    Quotes in the text of an SVG are written as such by Python 3.13's XML, and as entities before.
    """
    return [
        "\n".join([f"In [{cell.execution_count}]:", cell.source, *map(_text, cell.outputs)])
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _text(output: Any) -> str:
    is_stream = output.output_type == "stream"
    if is_stream:
        text = f"{output.name}: {output.text}"
    else:
        text = f"{output.output_type}: {dict(sorted(output.data.items()))}"
    return _LINE.sub(r"\1:_", text.replace("&quot;", '"'))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_the_outputs_that_are_stored_in_it(
    path: Path, tmp_path: Path, with_kernels: list[str]
) -> None:
    stored = read(path)
    assert shown(executed(stored, tmp_path, with_kernels)) == shown(stored)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_can_be_read_without_running_it(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert notebook.cells[0].source.startswith("# ")
    outputs = [output for cell in code for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert "assert" in "".join(cell.source for cell in code[-2:])


def test_there_is_a_notebook_for_each_thing_to_learn() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "change_activations_by_module_path",
        "compare_before_and_after",
        "find_the_layer_that_hurts",
        "fuse_and_profile",
        "fuse_into_a_custom_operator",
        "plug_in_a_kernel",
        "trace_and_look",
        "why_did_my_rule_not_match",
        "write_a_pass",
        "write_an_observer_and_a_scheme",
        "write_an_operator",
        "your_first_pass",
    ]


def test_a_stored_output_that_differs_is_found(tmp_path: Path, with_kernels: list[str]) -> None:
    cell = nbformat.v4.new_code_cell("print(1 + 1)")
    once = executed(nbformat.v4.new_notebook(cells=[cell]), tmp_path, with_kernels)
    assert shown(once) == ["In [1]:\nprint(1 + 1)\nstdout: 2\n"]
    once.cells[0].outputs[0].text = "3\n"
    assert shown(executed(once, tmp_path, with_kernels)) != shown(once)


def update() -> None:
    """Run every notebook and store its outputs."""
    for path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(read(path), Path(folder), [sys.executable])
        notebook.metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
        nbformat.write(notebook, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", required=True, help="store the outputs")
    parser.parse_args()
    update()
