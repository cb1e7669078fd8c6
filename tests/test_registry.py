"""Finding things by their module."""

from __future__ import annotations

import sys
import textwrap

import pytest

from fxkit.errors import FxkitError
from fxkit.registry import Registry, defined_here


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that writes a package of modules and gives its registry."""

    def make(**modules):
        folder = tmp_path / "things"
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(tmp_path)
        for name in [n for n in sys.modules if n.startswith("things")]:
            monkeypatch.delitem(sys.modules, name)
        return Registry("thing", "things", select)

    def select(module):
        for thing in vars(module).values():
            if isinstance(thing, type) and defined_here(module, thing):
                yield thing.__name__, thing

    return make


def test_things_are_found_by_module_in_order(package):
    found = package(b="class Second: ...", a="class First: ...")
    assert list(found) == ["First", "Second"]
    assert found["Second"].__module__ == "things.b"
    assert found.file_of("First").endswith("/things/a.py")
    assert len(found) == 2 and "First" in found


def test_what_is_imported_is_not_found_twice(package):
    found = package(a="class One: ...", b="from things.a import One")
    assert list(found) == ["One"]


def test_duplicate_names_cite_both_files(package):
    found = package(a="class Same: ...", b="class Same: ...")
    with pytest.raises(FxkitError, match=r"things/a\.py and .*things/b\.py"):
        list(found)


def test_unknown_name_lists_the_known(package):
    with pytest.raises(FxkitError, match="expected the name of a thing, got 'Other'") as caught:
        package(a="class One: ...")["Other"]
    assert caught.value.hint == "the known ones are: One"
