"""Text that the package prints into a page of the documentation, between two comments.

`pytest --update` writes what is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"

HoldPage = Callable[[str, str, str], None]
"""The type of the fixture `hold_page`."""


def hold_page(page: str, name: str, text: str, update: bool, folder: Path = DOCS) -> None:
    """Expect that a page shows a text, or write it there.

    Args:
        page: The name of a file of the documentation.
        name: What stands between `<!-- generated: name -->` and `<!-- end of name -->`.
        text: What it should be.
        update: Whether to write it.
        folder: Where the documentation lies.
    """
    path = folder / page
    shown = path.read_text()
    begin, end = f"<!-- generated: {name} -->\n\n", f"\n\n<!-- end of {name} -->"
    found = re.search(f"{re.escape(begin)}(.*?){re.escape(end)}", shown, re.DOTALL)
    if found is None:
        pytest.fail(f"expected docs/{page} to hold {begin.strip()} and {end.strip()}")
    if found[1] == text.strip("\n"):
        return
    if not update:
        pytest.fail(
            f"docs/{page} does not show what fxkit prints for {name}\n"
            "  hint: python -m pytest --update tests -k documentation"
        )
    path.write_text(shown[: found.start(1)] + text.strip("\n") + shown[found.end(1) :])
