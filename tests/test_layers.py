"""Imports go one way at every level; no class has another's name, no module a public function's."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import networkx as nx
import pytest

import fxkit

PACKAGE = Path(fxkit.__file__).parent

# From the bottom up. A module imports from its own row and from the rows before it.
ORDER = (
    ("errors", "config", "registry", "gc_pause", "cpu_info", "timing", "torch_adapters"),
    ("ir",),
    ("analysis",),
    ("tracing",),
    ("patterns",),
    ("testing",),
    ("passes",),
    ("lower",),
    ("quantization", "authoring"),
    ("view",),
    ("compiling",),
    ("searching",),
    ("reporting",),
    ("__init__",),
    ("exported_files", "doctor", "demo", "cli", "__main__"),
)
RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}

PUBLIC_FUNCTIONS = {
    "capture", "symbolic_trace", "opaque", "graph", "tree", "draw", "diff", "profile",
    "rule", "rewrite", "find", "explain", "edit", "compile", "quantize", "operator",
    "kernel", "register_kernel",
    "row_operator",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arrow:
    """One import: the file and line it stands at, and the parts that it joins."""

    file: str
    line: int
    source: str
    target: str

    @property
    def is_backwards(self) -> bool:
        return RANK[self.target] > RANK[self.source]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source} imports {self.target}"


@functools.cache
def _nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return what a file imports, calls and defines."""
    wanted = (ast.Import, ast.ImportFrom, ast.Call, ast.ClassDef)
    return tuple(n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, wanted))


def arrows(package: Path) -> list[Arrow]:
    """List every import of one part of the package by another, those inside functions too."""
    return [arrow for file in sorted(package.rglob("*.py")) for arrow in _arrows_of(file, package)]


def _arrows_of(file: Path, package: Path) -> Iterator[Arrow]:
    relative = file.relative_to(package)
    source = relative.parts[0].removesuffix(".py")
    for node in _nodes(file):
        for target in _targets(node, relative, package):
            yield Arrow(str(relative), node.lineno, source, target)  # type: ignore[attr-defined]


def _targets(node: ast.AST, relative: Path, package: Path) -> Iterator[str]:
    for module, names in _imported(node, relative):
        parts = module.split(".")
        if parts[0] != "fxkit":
            continue
        if len(parts) > 1:
            yield parts[1]
            continue
        for name in names or ("__init__",):
            is_part = (package / name).is_dir() or (package / f"{name}.py").is_file()
            yield name if is_part else "__init__"


def _imported(node: ast.AST, relative: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (module, names taken from it) for a node of any of the ways to import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ()
    elif isinstance(node, ast.ImportFrom):
        yield _absolute(node, relative), tuple(alias.name for alias in node.names)
    elif isinstance(node, ast.Call) and _name_of(node.func) in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value, ()


def _absolute(node: ast.ImportFrom, relative: Path) -> str:
    if not node.level:
        return node.module or ""
    package = ("fxkit", *relative.parts[:-1])
    base = package[: len(package) - node.level + 1]
    return ".".join((*base, *([node.module] if node.module else [])))


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_imports_go_one_way() -> None:
    found = arrows(PACKAGE)
    assert found
    backwards = [str(arrow) for arrow in found if arrow.is_backwards]
    assert backwards == [], (
        "import from where it is defined, as `from fxkit.analysis.objects import graph`"
    )


def circles(package: Path) -> list[str]:
    """List the files and folders that import each other in a circle, folder by folder.

    An import joins two files; it counts in the folder that holds both, between the two things of
    that folder, files or folders, in which they lie. Imports inside functions count, and so do
    those for types alone.
    """
    levels: dict[str, nx.DiGraph] = {}
    for file in sorted(package.rglob("*.py")):
        relative = file.relative_to(package)
        for node in _nodes(file):
            for target in _target_files(node, relative, package):
                folder, source, destination = _where_they_part(relative, target)
                if source != destination:
                    levels.setdefault(folder, nx.DiGraph()).add_edge(source, destination)
    return [
        f"{folder}: {', '.join(sorted(circle))}"
        for folder, graph in sorted(levels.items())
        for circle in nx.strongly_connected_components(graph)
        if len(circle) > 1
    ]


def _target_files(node: ast.AST, relative: Path, package: Path) -> Iterator[Path]:
    """Yield the files, from the package on, that a node imports."""
    for module, names in _imported(node, relative):
        first, *base = module.split(".")
        if first == "fxkit":
            for name in names or (None,):
                yield from _first_file(package, (*base, name) if name else base, base)


def _first_file(package: Path, *modules: Sequence[str]) -> Iterator[Path]:
    """Yield the file of the first module that is one."""
    for module in modules:
        folder = Path(*module)
        for file in (folder / "__init__.py", folder.parent / f"{folder.name}.py"):
            if (package / file).is_file():
                yield file
                return


def _where_they_part(source: Path, target: Path) -> tuple[str, str, str]:
    """Return the folder that holds both files, and what of that folder each lies in."""
    parts = zip(source.parts, target.parts, strict=False)
    shared = next((i for i, (a, b) in enumerate(parts) if a != b), len(source.parts) - 1)
    return str(Path(*source.parts[:shared])), source.parts[shared], target.parts[shared]


def test_nothing_imports_in_a_circle_at_any_level() -> None:
    assert circles(PACKAGE) == []


CIRCLES = {
    ".: a.py, b.py": {"a.py": "from fxkit import b", "b.py": "import fxkit.a"},
    ".: b.py, room": {
        "room/a.py": "from fxkit.b import x",
        "b.py": "from fxkit.room.c import y",
    },
    "room: a.py, b.py": {
        "room/a.py": "def f():\n    from fxkit.room import b",
        "room/b.py": "import fxkit.room.a",
    },
    "room: one, two": {
        "room/one/a.py": "from fxkit.room.two import b",
        "room/two/b.py": "from fxkit.room.one.c import z",
    },
}


@pytest.mark.parametrize(("expected", "planted"), CIRCLES.items())
def test_a_planted_circle_is_found(expected: str, planted: dict[str, str], tmp_path: Path) -> None:
    for name in (*planted, "room/c.py", "room/one/c.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(planted.get(name, ""))
        (file.parent / "__init__.py").touch()
    assert circles(tmp_path) == [expected]


def test_classes_have_names_of_their_own() -> None:
    found: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in _nodes(file):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_every_part_has_its_place_in_the_order() -> None:
    parts = {
        p.name.removesuffix(".py") for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()
    }
    assert parts - {"__pycache__"} - set(RANK) == set()


def test_no_module_carries_the_name_of_a_public_function() -> None:
    public = PUBLIC_FUNCTIONS | {
        name for name in fxkit.__all__ if callable(getattr(fxkit, name)) and name.islower()
    }
    taken = {path.stem for path in PACKAGE.rglob("*") if path.suffix == ".py" or path.is_dir()}
    assert taken & public == set()


@pytest.mark.parametrize(
    "planted",
    [
        "from fxkit.view.pages.page import report",
        "import fxkit.view.pages.page",
        "from fxkit import view",
        "from ..view import page",
        "import fxkit",
        "def late():\n    from fxkit.lower.fusion.partitioner import partition",
        "import importlib\nimportlib.import_module('fxkit.passes.manager.manager')",
    ],
)
def test_a_planted_arrow_that_runs_back_is_found(planted: str, tmp_path: Path) -> None:
    for folder in ("ir", "view"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ir" / "op.py").write_text(planted)
    assert [arrow.source for arrow in arrows(tmp_path) if arrow.is_backwards] == ["ir"]


@pytest.mark.parametrize(
    "planted",
    [
        "from fxkit.ir.op import resolve",
        "from fxkit import errors",
        "import torch",
        "from . import x",
    ],
)
def test_a_planted_arrow_that_runs_forward_is_allowed(planted: str, tmp_path: Path) -> None:
    for folder in ("ir", "view"):
        (tmp_path / folder).mkdir()
    (tmp_path / "errors.py").touch()
    (tmp_path / "view" / "page.py").write_text(planted)
    assert [arrow for arrow in arrows(tmp_path) if arrow.is_backwards] == []
