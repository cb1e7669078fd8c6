"""Quantization as on the processors whose output pages and notebooks show, for what runs them.

By default weights are pair-safe where a processor has AVX2 and lacks VNNI; there the output would
differ. To import this module lets weights be as they are elsewhere, in this process.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fxkit.quantization import specs

specs_of_processor: Any = specs
specs_of_processor.cpu_info = SimpleNamespace(adds_pairs_in_16_bits=lambda: False)
