"""Colours and fonts, light and dark, for drawings and pages."""

from __future__ import annotations

from collections.abc import Mapping

MONO = 'ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace'
SANS = (
    'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"Liberation Sans",sans-serif'
)

LIGHT: Mapping[str, str] = {
    "page": "#ffffff",
    "panel": "#f6f8fa",
    "ink": "#1b1f24",
    "muted": "#5b6672",
    "line": "#d0d7de",
    "edge": "#8a96a3",
    "accent": "#0b62d6",
    "good": "#1a7f45",
    "bad": "#c0361a",
    "mark": "#ffe8a3",
    "frame": "#5b7fae",
}
DARK: Mapping[str, str] = {
    "page": "#0f1419",
    "panel": "#171d24",
    "ink": "#e6edf3",
    "muted": "#98a5b3",
    "line": "#323b46",
    "edge": "#6b7886",
    "accent": "#6aa8ff",
    "good": "#5fd08a",
    "bad": "#ff8f6b",
    "mark": "#5a4a10",
    "frame": "#86a7d3",
}
FAMILY_COLOURS: Mapping[str, tuple[str, str, str, str]] = {
    "input": ("#eceff3", "#48525d", "#232a33", "#b4c0cc"),
    "contraction": ("#e1edff", "#1f6feb", "#12284a", "#6aa8ff"),
    "reduction": ("#efe6ff", "#7a3ff2", "#2a1d49", "#b794ff"),
    "pointwise": ("#dff5e7", "#1a7f45", "#11321f", "#5fd08a"),
    "layout": ("#f3f4f6", "#8a94a0", "#1c2229", "#8c97a4"),
    "lookup": ("#fff1cf", "#a86a00", "#372a0c", "#e9b44c"),
    "kernel": ("#ffe7dc", "#d0460c", "#401f10", "#ff8f5c"),
    "opaque": ("#ffe3ee", "#c21f6a", "#3f1528", "#ff7fb2"),
    "other": ("#e0f4f4", "#0f7b80", "#0f3032", "#54c7cc"),
}
"""For each family fill and border in the light scheme, then in the dark one."""

RAMP_LIGHT = ("#fff7e6", "#ffdf9e", "#ffb95c", "#f58a3c", "#d94f2b")
RAMP_DARK = ("#2a2418", "#55401a", "#875a1c", "#b9661f", "#e8602c")
"""Five steps from little to much, for colours that stand for numbers."""


def variables() -> str:
    """Return CSS that defines the colours as variables; `data-theme` overrules the system."""
    light = _declarations(LIGHT, 0)
    dark = _declarations(DARK, 2)
    return (
        f":root{{--mono:{MONO};--sans:{SANS};{light}color-scheme:light dark}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f":root[data-theme=light]{{{light}color-scheme:light}}"
        f":root[data-theme=dark]{{{dark}color-scheme:dark}}"
    )


def drawing_rules() -> str:
    """Return CSS for a drawing, in literal colours: not all viewers know variables."""
    light, dark = _drawing(LIGHT, 0, ""), _drawing(DARK, 2, "")
    return (
        _SHAPES
        + light
        + f"@media(prefers-color-scheme:dark){{{dark}}}"
        + _drawing(LIGHT, 0, "[data-theme=light] ")  # of a page around it
        + _drawing(DARK, 2, "[data-theme=dark] ")
    )


def _declarations(colours: Mapping[str, str], offset: int) -> str:
    plain = "".join(f"--{name}:{value};" for name, value in colours.items())
    families = "".join(
        f"--{name}-fill:{values[offset]};--{name}-ink:{values[offset + 1]};"
        for name, values in FAMILY_COLOURS.items()
    )
    ramp = "".join(
        f"--ramp-{i}:{colour};" for i, colour in enumerate(RAMP_DARK if offset else RAMP_LIGHT)
    )
    return plain + families + ramp


_SHAPES = (
    f".fx-svg text{{font-family:{MONO};font-size:12px}}"
    ".fx-svg .fx-t{font-weight:600}.fx-svg .fx-d,.fx-svg .fx-g text{font-size:10.5px}"
    f".fx-svg .fx-f text,.fx-svg .fx-l text{{font-family:{SANS};font-size:12px}}"
    ".fx-svg .fx-f .fx-t{font-size:12.5px}"
    ".fx-svg .fx-e path{fill:none;stroke-width:1.3}"
    ".fx-svg .fx-n rect{stroke-width:1.2}.fx-svg .fx-m rect{stroke-width:1.6}"
    ".fx-svg .fx-f rect{stroke-width:1.1;fill-opacity:.05;stroke-opacity:.55}"
    ".fx-svg .fx-g rect{stroke-dasharray:3 2.5}"
)


def _drawing(colours: Mapping[str, str], offset: int, scope: str) -> str:
    rules = {
        ".fx-svg .fx-b": f"fill:{colours['page']}",
        ".fx-svg text": f"fill:{colours['ink']}",
        ".fx-svg .fx-d,SCOPE.fx-svg .fx-k": f"fill:{colours['muted']}",
        ".fx-svg .fx-o .fx-d,SCOPE.fx-svg .fx-o .fx-k": f"fill:{colours['ink']}",
        ".fx-svg .fx-e path": f"stroke:{colours['edge']}",
        ".fx-svg .fx-e polygon,SCOPE.fx-svg .fx-a": f"fill:{colours['edge']}",
        ".fx-svg .fx-f rect": f"fill:{colours['frame']};stroke:{colours['frame']}",
        ".fx-svg .fx-f .fx-s": f"fill:{colours['page']};fill-opacity:1",
        ".fx-svg .fx-g rect": f"fill:{colours['page']};stroke:{colours['edge']}",
        ".fx-svg .fx-g text": f"fill:{colours['muted']}",
    }
    for name, values in FAMILY_COLOURS.items():
        rules[f".fx-svg .fx-c-{name}"] = f"fill:{values[offset]};stroke:{values[offset + 1]}"
    for i, colour in enumerate(RAMP_DARK if offset else RAMP_LIGHT):
        rules[f".fx-svg .fx-r-{i}"] = f"fill:{colour};stroke:{colours['edge']}"
    return "".join(
        f"{scope}{selector.replace('SCOPE', scope)}{{{style}}}" for selector, style in rules.items()
    )
