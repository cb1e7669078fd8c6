"""Limits for continuous integration: `nodes>+5%`, `time>+10%`, `bytes>1e9`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fxkit.errors import UnsupportedError
from fxkit.view.texts.text_table import duration, quantity

MEASURES = ("nodes", "flops", "bytes", "time", "memory")
"""What a limit may be on; a difference has no time and no memory."""

_FORM = re.compile(
    r"\s*(?P<measure>[a-z]+)\s*(?P<sign>>=?|<=?)\s*(?P<limit>[+-]?[\d.]+(?:e[+-]?\d+)?)"
    r"\s*(?P<percent>%?)\s*"
)


@dataclass(frozen=True)
class Gate:
    """One limit.

    Attributes:
        text: As it was written.
        measure: One of `MEASURES`.
        sign: `>`, `>=`, `<` or `<=`: what is a failure.
        limit: The number behind the sign; in percent, seconds, bytes, ... .
        is_change: Whether the limit is on a change: it was written with a sign, or in percent.
        is_percent: Whether the limit is a share of what was before.
    """

    text: str
    measure: str
    sign: str
    limit: float
    is_change: bool
    is_percent: bool

    def failure(
        self, before: Mapping[str, float | None], after: Mapping[str, float | None]
    ) -> str | None:
        """Return what is wrong, in words; None when nothing is.

        Raises:
            UnsupportedError: What the limit is on is not known.
        """
        now, then = after.get(self.measure), before.get(self.measure)
        if now is None or (self.is_change and then is None):
            raise UnsupportedError(
                f"expected {self.measure} to be known for {self.text!r}, got nothing",
                hint="a change needs something to compare with, and FLOPs need shapes",
            )
        value = now
        if self.is_change:
            value = now - (then or 0.0)
            if self.is_percent:
                value = 100 * value / then if then else (0.0 if not value else float("inf"))
        if not _fails(value, self.sign, self.limit):
            return None
        show = duration if self.measure == "time" else quantity
        was = f"{show(then)} → " if then is not None else ""
        change = f" ({100 * (now - then) / then:+.1f} %)" if then else ""
        return f"{self.text} holds: {self.measure} {was}{show(now)}{change}"


def _fails(value: float, sign: str, limit: float) -> bool:
    if value == limit:
        return "=" in sign
    return value > limit if sign.startswith(">") else value < limit


def parse_gate(text: str) -> Gate:
    """Read a limit.

    Raises:
        UnsupportedError: It has another form, or is on something else.
    """
    found = _FORM.fullmatch(text)
    if found is None or found["measure"] not in MEASURES:
        raise UnsupportedError(
            f"expected a limit such as 'nodes>+5%', got {text!r}",
            hint=f"limits are on {', '.join(MEASURES)}; with a sign or in % on their change",
        )
    limit = found["limit"]
    try:
        number = float(limit)
    except ValueError as error:
        raise UnsupportedError(f"expected a number in {text!r}, got {limit!r}") from error
    is_change = limit[0] in "+-" or bool(found["percent"])
    return Gate(
        text.strip(), found["measure"], found["sign"], number, is_change, bool(found["percent"])
    )
