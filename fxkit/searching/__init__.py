"""Search: which layers take which numbers, by the measured latency of compiled programs.

It compiles what it tries, and so lies above the compiler; `fxkit.quantization.search` is the name.
"""

from __future__ import annotations

from fxkit.searching.number_formats import FORMATS
from fxkit.searching.search import search
from fxkit.searching.search_result import SearchResult, Trial

__all__ = ["FORMATS", "SearchResult", "Trial", "search"]
