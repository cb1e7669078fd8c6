"""The page of what torch's operators are lowered to is what `DecomposeToCore` does."""

from __future__ import annotations

import pytest

from tests.core_definitions import definitions, page_of
from tests.generated_text import DOCS, HoldPage

PARTS = 60


def test_the_page_says_what_some_operators_are_lowered_to() -> None:
    page = (DOCS / "core_definitions.md").read_text().splitlines()
    found = definitions(7, PARTS)
    assert len(found) > 5
    missing = [row for name, one in found.items() if (row := one.row(name)) not in page]
    assert not missing, "\n".join(missing)


@pytest.mark.sweep
def test_the_documentation_says_what_all_operators_are_lowered_to(hold_page: HoldPage) -> None:
    hold_page("core_definitions.md", "core definitions", page_of(definitions(0, 1)))
