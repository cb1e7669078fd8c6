"""One self-contained HTML file: style sheet and script inline, nothing fetched from anywhere."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

from fxkit.ir.writing import writing
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.theme import variables

__all__ = [
    "escape",
    "fragment_page",
    "notebook_bundle",
    "script",
    "styles",
    "viewer_script",
    "write_file",
]

_VIEWER = ("words.js", "layout.js", "scene.js", "painter.js", "panel.js", "viewer.js")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@functools.cache
def styles() -> str:
    """Return the style sheet of all pages."""
    return variables() + _asset("page.css")


@functools.cache
def script() -> str:
    """Return the script that makes tables sort and pages change between light and dark."""
    return _asset("page.js")


@functools.cache
def viewer_script() -> str:
    """Return the script of the viewer of graphs."""
    return "".join(_asset(name) for name in _VIEWER)


def fragment_page(title: str, body: str, *, kind: str = "fx-page") -> str:
    """Put HTML into a page of its own.

    Args:
        title: What the tab is called; escaped here.
        body: HTML that is already escaped.
        kind: Class of the body, which tells a report from a full-window drawing.
    """
    scripts = f"<script>{viewer_script()}</script>" if 'class="fx-data"' in body else ""
    scripts += f"<script>{script()}</script>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{styles()}</style></head>"
        f'<body class="{kind}">{body}{scripts}</body></html>\n'
    )


def notebook_bundle(text: str, page: str, height: int = 480, **others: str) -> dict[str, str]:
    """Return what a notebook shows: the page in a frame of its own, so that no style leaks out.

    Args:
        text: The same as plain text.
        page: A whole page.
        height: Of the frame, in pixels.
        others: More forms, by kind: `svg`.
    """
    frame = (
        f'<iframe srcdoc="{escape(page)}" style="width:100%;height:{height}px;border:0"></iframe>'
    )
    bundle = {"text/plain": text, "text/html": frame}
    if "svg" in others:
        bundle["image/svg+xml"] = others["svg"]
    return bundle


def write_file(path: str | Path, content: str | bytes) -> Path:
    """Write a file.

    Returns:
        The path.

    Raises:
        UnsupportedError: The path can't be written; the message says why.
    """
    path = Path(path)
    encoded = content.encode("utf-8", "replace") if isinstance(content, str) else content
    with writing(path):
        path.write_bytes(encoded)
    return path


def _asset(name: str) -> str:
    return resources.files("fxkit.view").joinpath("assets", name).read_text(encoding="utf-8")
