"""README, documentation and docstrings: their code runs, and prints what they show."""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import fxkit
from fxkit import config
from fxkit.lower.codegen.cpp import softmax_without_maximum
from fxkit.passes.properties import PROPERTIES
from fxkit.quantization import specs
from tests.code_blocks import python_blocks, run_page
from tests.generated_text import HoldPage
from tests.generated_text import hold_page as held

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [
    info.name
    for info in pkgutil.walk_packages(fxkit.__path__, "fxkit.")
    if info.name != "fxkit.__main__"
]


def has_examples(name: str) -> bool:
    """Tell whether the source of a module, which is not imported, holds a doctest's prompt."""
    spec = importlib.util.find_spec(name)
    return spec is not None and ">>> " in Path(spec.origin or "").read_text()


@pytest.fixture
def _own_properties() -> Iterator[None]:
    """Forget the properties that a page defines."""
    before = dict(PROPERTIES)
    yield
    PROPERTIES.clear()
    PROPERTIES.update(before)


@pytest.mark.usefixtures("_own_properties")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # As on processors with AVX-512 and VNNI: weights are not pair-safe, and blocks have 128 powers.
    with_vnni = SimpleNamespace(adds_pairs_in_16_bits=lambda: False)
    monkeypatch.setattr(specs, "cpu_info", with_vnni)
    with_lanes = SimpleNamespace(features=lambda: frozenset({"avx"}))
    monkeypatch.setattr(softmax_without_maximum, "cpu_info", with_lanes)
    assert run_page(page) == []


def test_readme_shows_an_example_of_at_most_fifteen_lines_with_its_output() -> None:
    first = python_blocks((ROOT / "README.md").read_text())[0]
    assert first.code.count("\n") <= 15
    assert first.output


def test_every_module_can_be_imported() -> None:
    for name in MODULES:
        importlib.import_module(name)


@pytest.mark.parametrize("name", [name for name in MODULES if has_examples(name)])
def test_the_examples_in_docstrings_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_the_documentation_has_the_row_of_every_variable(hold_page: HoldPage) -> None:
    table = re.findall(r"^\|.*$", config.__doc__ or "", re.MULTILINE)
    assert table
    hold_page("configuration.md", "variables", "\n".join(table))


@pytest.mark.parametrize(
    "package",
    [
        "fxkit",
        "fxkit.patterns",
        "fxkit.passes",
        "fxkit.lower",
        "fxkit.quantization",
        "fxkit.authoring.kernels",
        "fxkit.view",
        "fxkit.testing",
    ],
)
def test_the_reference_has_every_public_name(package: str) -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    targets = re.findall(r"^\.\. auto\w+:: (\S+)", page, re.MULTILINE)
    members = re.findall(r"^   :members: (.+)", page, re.MULTILINE)
    shown = {target.rpartition(".")[2] for target in targets} | {*", ".join(members).split(", ")}
    module = importlib.import_module(package)
    public = {n for n in module.__all__ if not isinstance(getattr(module, n), ModuleType)}
    assert public
    assert public <= shown


def test_links_between_pages_lead_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:)([^)#\s]+)")
    dead = [
        f"{page.name}: {target}"
        for page in [*PAGES, ROOT / "CHANGELOG.md"]
        for target in link.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    assert dead == []


def anchors(page: Path) -> set[str]:
    """Return the names under which the headings of a page can be linked."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:fxkit/|tests/)?[a-z_]+(?:/[a-z_]+)+(?:\.py|/)?)`", text))
    roots = (ROOT, ROOT / "fxkit")
    assert len(named) > 20
    assert [n for n in sorted(named) if not any((root / n).exists() for root in roots)] == []


def test_links_to_headings_lead_to_one() -> None:
    link = re.compile(r"\]\((?!https?:)([^)#\s]*\.md)?#([^)\s]+)\)")
    dead = [
        f"{page.name}: {target}#{heading}"
        for page in PAGES
        for target, heading in link.findall(page.read_text())
        if heading not in anchors(page.parent / target if target else page)
    ]
    assert dead == []


def test_generated_text_is_held_and_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- generated: one -->\n\nold\n\n<!-- end of one -->\nz\n")
    with pytest.raises(pytest.fail.Exception, match="--update"):
        held("page.md", "one", "new\n", False, tmp_path)
    held("page.md", "one", "new\n", True, tmp_path)
    held("page.md", "one", "new\n", False, tmp_path)
    assert page.read_text() == "a\n<!-- generated: one -->\n\nnew\n\n<!-- end of one -->\nz\n"
    with pytest.raises(pytest.fail.Exception, match="generated: two"):
        held("page.md", "two", "new\n", True, tmp_path)


def test_a_page_that_shows_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    assert run_page(page) == ["page.md:2 shows\n3\n\nbut prints\n2\n"]


def test_every_notebook_is_a_page_of_the_website() -> None:
    notebooks = sorted(path.stem for path in (ROOT / "examples" / "notebooks").glob("*.ipynb"))
    index = (ROOT / "docs" / "index.md").read_text()
    assert sorted(re.findall(r"^notebooks/(\w+)$", index, re.MULTILINE)) == notebooks
    assert sorted(re.findall(r"\]\(\.\./examples/notebooks/(\w+)\.ipynb\)", index)) == notebooks
