"""Text as it may stand in HTML and SVG."""

from __future__ import annotations

from html import escape as html_escape

_ILLEGAL = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 0xFFFE, 0xFFFF], "\ufffd")


def escape(text: str) -> str:
    """Escape text for XML and HTML, in content and in quoted attributes."""
    clean = str(text).translate(_ILLEGAL)
    return html_escape(clean.encode("utf-8", "replace").decode("utf-8"), quote=True)
