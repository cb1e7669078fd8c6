"""Colours for C++ and Python text, light: comments, strings, numbers, keywords."""

from __future__ import annotations

import re

from fxkit.view.texts.escaping import escape

_CPP = (
    "alignas auto bool break case char class const constexpr continue default do double else enum "
    "extern float for if inline int int32_t int64_t long namespace noexcept restrict return short "
    "signed sizeof static static_cast struct switch template this typedef typename uint32_t "
    "uint64_t uint8_t union unsigned using void while __restrict__ __attribute__"
)
_PYTHON = (
    "False None True and as assert async await break class continue def del elif else except "
    "finally for from global if import in is lambda not or pass raise return self try while with "
    "yield"
)
_KEYWORDS = {"cpp": frozenset(_CPP.split()), "python": frozenset(_PYTHON.split())}
_TOKENS = {
    "cpp": re.compile(
        r"(?P<c>//[^\n]*|/\*.*?\*/)|(?P<p>^[ \t]*\#[^\n]*)|(?P<s>\"(?:\\.|[^\"\\\n])*\")"
        r"|(?P<n>\b(?:0x[0-9a-fA-F]+|\d[\d.]*(?:[eE][-+]?\d+)?)[fFuUlL]*\b)|(?P<w>\b[A-Za-z_]\w*\b)",
        re.DOTALL | re.MULTILINE,
    ),
    "python": re.compile(
        r"(?P<c>\#[^\n]*)|(?P<p>^[ \t]*@[\w.]+)"
        r"|(?P<s>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
        r"|(?P<n>\b\d[\d.]*(?:[eE][-+]?\d+)?\b)|(?P<w>\b[A-Za-z_]\w*\b)",
        re.MULTILINE,
    ),
}


def highlight(text: str, language: str) -> str:
    """Return text as escaped HTML with spans of class `c`, `s`, `n`, `k` and `p`.

    Args:
        text: Source text.
        language: `"cpp"` or `"python"`; other text is only escaped.
    """
    tokens = _TOKENS.get(language)
    if tokens is None:
        return escape(text)
    parts: list[str] = []
    end = 0
    for token in tokens.finditer(text):
        kind = token.lastgroup or ""
        if kind == "w":
            if token[0] not in _KEYWORDS[language]:
                continue
            kind = "k"
        parts.append(escape(text[end : token.start()]))
        parts.append(f'<span class="{kind}">{escape(token[0])}</span>')
        end = token.end()
    parts.append(escape(text[end:]))
    return "".join(parts)
