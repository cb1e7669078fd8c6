"""Show a view to whoever sits before the screen: below a notebook's cell, or in a browser."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from collections.abc import Callable
from typing import Any

from fxkit.errors import UnsupportedError
from fxkit.view.pages.page import write_file


def show(value: Any, page: Callable[[], str]) -> None:
    """Show a value.

    Args:
        value: What a notebook shows.
        page: Makes the page that a browser shows; it is written to a file of the user's own.

    Raises:
        UnsupportedError: There is neither a notebook nor a browser.
    """
    if is_notebook():
        from IPython.display import display

        display(value)
        return
    try:
        browser = webbrowser.get()
    except webbrowser.Error as error:
        raise UnsupportedError(
            "expected a notebook or a browser to show a drawing in, got neither",
            hint="write it to a file: .save('graph.html')",
        ) from error
    handle, name = tempfile.mkstemp(suffix=".html", prefix="fxkit-")
    os.close(handle)
    browser.open(write_file(name, page()).as_uri())


def is_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
