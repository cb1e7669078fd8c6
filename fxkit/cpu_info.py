"""What the system tells of its processor, and how much of that kernels may use."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fxkit import config
from fxkit.errors import UnsupportedError


@dataclass(frozen=True)
class Level:
    """Instruction sets that x86-64 processors have in common.

    Attributes:
        march: What compilers call them.
        features: What Linux calls those that were added to the level below.
    """

    march: str
    features: frozenset[str]


# From the least to the most. Source: the x86-64 psABI, "Micro-Architecture Levels".
LEVELS: Mapping[str, Level] = {
    "baseline": Level("x86-64", frozenset("cmov cx8 fpu fxsr mmx sse sse2".split())),
    "avx2": Level(
        "x86-64-v3",
        frozenset(
            "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 "
            "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split()
        ),
    ),
    "avx512": Level("x86-64-v4", frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())),
}


@functools.cache
def info() -> str | None:
    """Return what Linux tells of the processors, as text; None on another system."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def info_line(*names: str) -> str | None:
    """Return the first line of that text that has one of these names, or None."""
    return _line_of(info(), names)


@functools.cache
def _line_of(text: str | None, names: tuple[str, ...]) -> str | None:
    found = re.search(rf"^({'|'.join(names)})\s*:.*$", text or "", re.MULTILINE)
    return found and found[0]


def model_name(otherwise: str = "unknown CPU") -> str:
    """Return what the processor calls itself, or something else where the system does not say."""
    return _value(info_line("model name")) or otherwise


def features() -> frozenset[str]:
    """Return the instruction sets that kernels may use, as Linux calls them.

    Raises:
        UnsupportedError: When `FXKIT_CPU_LEVEL` asks for a level that the processor lacks.
    """
    asked = config.cpu_level()
    if asked == "native":
        return _known_features()
    _require(asked)
    return _features_of(asked)


def adds_pairs_in_16_bits() -> bool:
    """Tell whether the fastest product of bytes adds two of them in 16 bits, and saturates.

    So does `vpmaddubsw`; processors that have VNNI add four of them in 32 bits.
    """
    known = features()
    has_vnni = "avx_vnni" in known or {"avx512_vnni", "avx512bw"} <= known
    return "avx2" in known and not has_vnni


def march() -> str:
    """Return the processor that kernels are built for, as compilers call it.

    Raises:
        UnsupportedError: When `FXKIT_CPU_LEVEL` asks for a level that the processor lacks.
    """
    asked = config.cpu_level()
    if asked == "native":
        return "native"
    _require(asked)
    return LEVELS[asked].march


def known_levels() -> tuple[str, ...]:
    """Return the levels that this processor has, from the least to the most."""
    known = _known_features()
    return tuple(name for name in LEVELS if _features_of(name) <= known)


def _require(level: str) -> None:
    if level in (known := known_levels()):
        return
    raise UnsupportedError(
        f"expected FXKIT_CPU_LEVEL to be a level that this processor has, got {level!r}: "
        f"{model_name()} has {' and '.join(known) or 'none that is known'}",
        hint="unset FXKIT_CPU_LEVEL to use all that the processor has",
    )


def _features_of(level: str) -> frozenset[str]:
    names = list(LEVELS)
    upto = names[: names.index(level) + 1]
    return frozenset().union(*(LEVELS[name].features for name in upto))


def _known_features() -> frozenset[str]:
    return _names_in(info_line("flags", "Features"))


@functools.cache
def _names_in(line: str | None) -> frozenset[str]:
    return frozenset(_value(line).split())


def _value(line: str | None) -> str:
    return (line or "").partition(":")[2].strip()
