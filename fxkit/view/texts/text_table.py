"""Numbers and units that a person can read, beside plain text in aligned columns."""

from __future__ import annotations

from fxkit.ir.text_table import aligned, pad, table

__all__ = ["aligned", "duration", "pad", "percent", "plural", "quantity", "table"]

_UNITS = ("", "k", "M", "G", "T", "P")


def quantity(value: float | None, unit: str = "") -> str:
    """Show a count with three digits and a prefix: `22.7M`; None is shown as `?`."""
    if value is None:
        return "?"
    step = 0
    scaled = float(value)
    while abs(scaled) >= 999.5 and step < len(_UNITS) - 1:
        scaled /= 1000
        step += 1
    if step == 0 and scaled == int(scaled):
        digits = f"{int(scaled)}"
    else:
        digits = f"{scaled:.3g}" if abs(scaled) < 99.95 else f"{scaled:.0f}"
    return f"{digits}{' ' if unit else ''}{_UNITS[step]}{unit}"


def duration(seconds: float | None) -> str:
    """Show seconds with three digits in the unit that fits: `1.23 ms`; None is shown as `?`."""
    if seconds is None:
        return "?"
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit * 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds)} s"


def percent(part: float, whole: float) -> str:
    """Show a share with one decimal: `12.5 %`."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def plural(count: int, word: str) -> str:
    """Show a count with its word: `1 node`, `2 nodes`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _three(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
