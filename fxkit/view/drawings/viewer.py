"""The HTML of the viewer: data, controls and an empty canvas; `assets/viewer.js` does the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxkit.view.drawings.graph_data import as_script
from fxkit.view.texts.escaping import escape
from fxkit.view.texts.text_table import plural

_BUTTONS = (
    ("open", "open all", "open all modules (e)"),
    ("close", "close all", "close all modules (E)"),
    ("more", "level +", "open one level of modules (d)"),
    ("less", "level −", "close one level of modules (D)"),
    ("fit", "fit", "show all (0)"),
    ("out", "−", "smaller (-)"),
    ("in", "+", "larger (+)"),
    ("theme", "◐", "light or dark (t)"),
    ("help", "?", "keys (?)"),
)
_HINT = (
    "point at a box to see what it is; drag to move, wheel to zoom, double click to open, ? helps"
)


def viewer_html(data: Mapping[str, Any], label: str) -> str:
    """Return a viewer of one graph, without a page around it.

    Args:
        data: What `graph_data` returns, with `steps` for a timeline.
        label: What a screen reader says of it.
    """
    buttons = "".join(
        f'<button data-do="{name}" title="{tip}" aria-label="{tip}">{words}</button>'
        for name, words, tip in _BUTTONS
        if name not in ("open", "close", "more", "less") or len(data["groups"]) > 1
    )
    return (
        f'<div class="fx-viewer" tabindex="0" role="application" aria-label="{escape(label)}">'
        f'<script type="application/json" class="fx-data">{as_script(data)}</script>'
        f'<div class="fx-bar"><b>{escape(str(data["title"]))}</b>'
        f'<span class="fx-muted">{_size(data)}</span>'
        '<input type="search" placeholder="search: name, operator, shape (regular expression)" '
        'aria-label="search"><output></output><label>colour <select></select></label>'
        f"{buttons}</div>{_steps(data)}"
        '<div class="fx-body"><div class="fx-stage"><canvas></canvas></div>'
        '<aside class="fx-panel" hidden></aside><dl class="fx-help" hidden></dl></div>'
        '<div class="fx-legend"></div>'
        f'<div class="fx-info" aria-live="polite">{_HINT}</div>'
        "<noscript>This drawing needs JavaScript; .save('graph.svg') writes one that does not."
        "</noscript></div>"
    )


def _size(data: Mapping[str, Any]) -> str:
    shown = data["shown"]
    part = "" if shown == data["nodes"] or "steps" in data else f"{shown:,} of "
    return f"{part}{plural(data['nodes'], 'node')}"


def _steps(data: Mapping[str, Any]) -> str:
    """Return the slider over the steps of a timeline."""
    last = len(data.get("steps", ())) - 1
    if last < 1:
        return ""
    slider = (
        f'<label>pass <input type="range" min="0" max="{last}" value="1" aria-label="pass"></label>'
        if last > 1
        else '<input type="range" min="0" max="1" value="1" hidden aria-label="pass">'
    )
    return (
        f'<div class="fx-bar fx-steps">{slider}'
        '<label><input type="checkbox" data-split checked> side by side</label>'
        '<label><input type="checkbox" data-ghosts checked> show what is not there</label>'
        '<span class="fx-step"></span></div>'
    )
