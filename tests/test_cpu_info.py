"""The processor is described from what Linux tells of it, and by nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fxkit import cpu_info
from fxkit.errors import UnsupportedError

X86 = """\
processor\t: 0
model name\t: Some CPU @ 2.40GHz: a model
flags\t\t: fpu avx2 avx512f

processor\t: 1
model name\t: Another CPU
flags\t\t: fpu
"""
ARM = """\
processor\t: 0
Features\t: fp asimd
"""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the system be asked anew, now and afterwards."""
    monkeypatch.delenv("FXKIT_CPU_LEVEL", raising=False)
    cpu_info.info.cache_clear()
    yield monkeypatch
    cpu_info.info.cache_clear()


def test_the_first_processor_is_described(told: pytest.MonkeyPatch) -> None:
    told.setattr(Path, "read_text", lambda path, **options: X86)
    assert cpu_info.model_name() == "Some CPU @ 2.40GHz: a model"
    assert cpu_info.features() == {"fpu", "avx2", "avx512f"}
    assert cpu_info.info_line("model name") == "model name\t: Some CPU @ 2.40GHz: a model"


def test_other_processors_have_other_words(told: pytest.MonkeyPatch) -> None:
    told.setattr(Path, "read_text", lambda path, **options: ARM)
    assert cpu_info.model_name() == "unknown CPU"
    assert cpu_info.features() == {"fp", "asimd"}
    assert cpu_info.info_line("flags", "Features") == "Features\t: fp asimd"


def test_another_system_tells_nothing(told: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: str) -> str:
        raise FileNotFoundError(path)

    told.setattr(Path, "read_text", refuse)
    assert cpu_info.info() is None
    assert cpu_info.model_name("another") == "another"
    assert cpu_info.features() == frozenset()


def with_level(name: str) -> str:
    """Return what a processor of a level, with more besides, tells."""
    levels = list(cpu_info.LEVELS)
    upto = levels[: levels.index(name) + 1]
    known = {"aes", *(flag for one in upto for flag in cpu_info.LEVELS[one].features)}
    return f"model name\t: Some CPU\nflags\t\t: {' '.join(sorted(known))}\n"


@pytest.mark.parametrize("asked", cpu_info.LEVELS)
@pytest.mark.parametrize("has", cpu_info.LEVELS)
def test_kernels_use_no_more_than_a_level(told: pytest.MonkeyPatch, has: str, asked: str) -> None:
    told.setattr(Path, "read_text", lambda path, **options: with_level(has))
    levels = list(cpu_info.LEVELS)
    assert cpu_info.march() == "native" and "aes" in cpu_info.features()
    assert cpu_info.known_levels() == tuple(levels[: levels.index(has) + 1])
    told.setenv("FXKIT_CPU_LEVEL", asked)
    if levels.index(asked) > levels.index(has):
        for ask in (cpu_info.march, cpu_info.features):
            with pytest.raises(UnsupportedError, match=f"got '{asked}': Some CPU has baseline"):
                ask()
        return
    assert cpu_info.march() == cpu_info.LEVELS[asked].march
    assert "aes" not in cpu_info.features()
    assert cpu_info.LEVELS[asked].features <= cpu_info.features()
    assert ("avx512f" in cpu_info.features()) == (asked == "avx512")


def test_levels_of_another_system_are_not_known(told: pytest.MonkeyPatch) -> None:
    told.setattr(Path, "read_text", lambda path, **options: ARM)
    told.setenv("FXKIT_CPU_LEVEL", "baseline")
    with pytest.raises(UnsupportedError, match="unknown CPU has none that is known"):
        cpu_info.march()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2", True),
        ("fpu avx2 avx_vnni", False),
        ("fpu avx2 avx512f avx512bw", True),
        ("fpu avx2 avx512f avx512bw avx512_vnni", False),
        ("fpu sse2", False),
        ("fp asimd", False),
    ],
)
def test_products_of_bytes_are_added_in_16_bits_without_vnni(
    told: pytest.MonkeyPatch, flags: str, expected: bool
) -> None:
    told.setattr(Path, "read_text", lambda path, **options: f"flags : {flags}\n")
    assert cpu_info.adds_pairs_in_16_bits() is expected
