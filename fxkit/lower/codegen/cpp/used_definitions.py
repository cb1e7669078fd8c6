"""Of the C++ definitions that stand before kernels, those that the kernels use.

A compiler reads and analyses all that it is given: the functions of explicit vectors, none of which
a small kernel calls, took a fifth of the time of building one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_ATTRIBUTE = re.compile(r"__attribute__\(\(.*?\)\)|alignas\(\d+\)")
_NAMED = (
    re.compile(r"(?:template\b|FX_|static\b)[^;={(]*\binline\b[^;={(]*?\b(\w+)(?:<[^<>()]*>)?\("),
    re.compile(r"(?:template\b[^(]*)?FX_INLINE\b[^;={(]*?\b(\w+)(?:<[^<>()]*>)?\("),
    re.compile(r"static const \w+ (\w+)(?:\[[^\]]*\])* = "),
    re.compile(r"#define (\w+)"),
    re.compile(r"#pragma omp declare reduction\((\w+)"),
)
_IS_BEFORE = "#pragma omp declare simd"  # what is the next thing


@dataclass(frozen=True)
class _Item:
    """Something at the top level of a text, with the comment above it.

    Attributes:
        text: What it says.
        name: What others call it by, or None for what has to stay.
        words: The names that it says.
    """

    text: str
    name: str | None
    words: frozenset[str]


def used_definitions(definitions: Iterable[str], texts: Iterable[str]) -> str:
    """Return definitions less the functions, tables and macros that nothing names.

    Of functions that share a name all stay or none.

    Args:
        definitions: C++ in the style of our own: what begins in a line ends with one, and each
            text ends what it begins.
        texts: What uses them.
    """
    items = [item for part in definitions for item in _items(part)]
    named: dict[str, list[_Item]] = {}
    words: set[str] = set()
    for item in items:
        if item.name is None:
            words |= item.words
        else:
            named.setdefault(item.name, []).append(item)
    for text in texts:
        words.update(_NAME.findall(text))
    used: set[str] = set()
    while new := (words & named.keys()) - used:
        used |= new
        words = {word for name in new for item in named[name] for word in item.words}
    kept = [item.text for item in items if item.name is None or item.name in used]
    return "\n".join(kept)


@functools.lru_cache(maxsize=256)
def _items(text: str) -> tuple[_Item, ...]:
    """Divide a text at the ends of lines that lie within no brackets."""
    items: list[_Item] = []
    lines: list[str] = []
    depth, is_directive = 0, False
    for line in text.splitlines():
        lines.append(line)
        code = _STRING.sub("", line).partition("//")[0].strip()
        if is_directive or code.startswith("#"):
            is_directive = code.endswith("\\")
            is_end = not depth and not is_directive and not code.startswith(_IS_BEFORE)
        else:
            depth += sum(map(code.count, "({[")) - sum(map(code.count, ")}]"))
            is_end = not depth and code.endswith((";", "}"))
        if is_end:
            items.append(_item(lines))
            lines = []
    return (*items, _item(lines)) if lines else tuple(items)


def _item(lines: list[str]) -> _Item:
    code = "\n".join(line for line in lines if not line.startswith("//")).strip()
    head = _ATTRIBUTE.sub("", code).strip()
    found = None
    if "operator" not in head.partition("{")[0]:
        found = next((match for pattern in _NAMED if (match := pattern.match(head))), None)
    name = found[1] if found else None
    return _Item("\n".join(lines), name, frozenset(_NAME.findall(code)))
