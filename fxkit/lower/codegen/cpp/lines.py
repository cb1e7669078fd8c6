"""Lines of generated code, indented as blocks open and close."""

from __future__ import annotations


class Lines:
    """What a printer of kernels writes into."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def _taken(self) -> str:
        """Return the lines printed so far, and begin anew."""
        text = "\n".join(self._lines) + "\n"
        self._lines = []
        return text

    def _add(self, line: str) -> None:
        self._lines.append("  " * self._depth + line)

    def _open(self, line: str) -> None:
        self._add(line)
        self._depth += 1

    def _close(self, end: str = "") -> None:
        self._depth -= 1
        self._add(f"}}{end}")
