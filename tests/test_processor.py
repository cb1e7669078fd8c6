"""The processor is described from what Linux tells of it, and by nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fxkit import processor
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
    processor.info.cache_clear()
    yield monkeypatch
    processor.info.cache_clear()


def test_the_first_processor_is_described(told: pytest.MonkeyPatch) -> None:
    told.setattr(Path, "read_text", lambda path, **options: X86)
    assert processor.model_name() == "Some CPU @ 2.40GHz: a model"
    assert processor.features() == {"fpu", "avx2", "avx512f"}
    assert processor.info_line("model name") == "model name\t: Some CPU @ 2.40GHz: a model"


def test_other_processors_have_other_words(told: pytest.MonkeyPatch) -> None:
    told.setattr(Path, "read_text", lambda path, **options: ARM)
    assert processor.model_name() == "unknown CPU"
    assert processor.features() == {"fp", "asimd"}
    assert processor.info_line("flags", "Features") == "Features\t: fp asimd"


def test_another_system_tells_nothing(told: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: str) -> str:
        raise FileNotFoundError(path)

    told.setattr(Path, "read_text", refuse)
    assert processor.info() is None
    assert processor.model_name("another") == "another"
    assert processor.features() == frozenset()


def with_level(name: str) -> str:
    """Return what a processor of a level, with more besides, tells."""
    levels = list(processor.LEVELS)
    upto = levels[: levels.index(name) + 1]
    known = {"aes", *(flag for one in upto for flag in processor.LEVELS[one].features)}
    return f"model name\t: Some CPU\nflags\t\t: {' '.join(sorted(known))}\n"


@pytest.mark.parametrize("asked", processor.LEVELS)
@pytest.mark.parametrize("has", processor.LEVELS)
def test_kernels_use_no_more_than_a_level(told: pytest.MonkeyPatch, has: str, asked: str) -> None:
    told.setattr(Path, "read_text", lambda path, **options: with_level(has))
    levels = list(processor.LEVELS)
    assert processor.march() == "native" and "aes" in processor.features()
    assert processor.known_levels() == tuple(levels[: levels.index(has) + 1])
    told.setenv("FXKIT_CPU_LEVEL", asked)
    if levels.index(asked) > levels.index(has):
        for ask in (processor.march, processor.features):
            with pytest.raises(UnsupportedError, match=f"got '{asked}': Some CPU has baseline"):
                ask()
        return
    assert processor.march() == processor.LEVELS[asked].march
    assert "aes" not in processor.features()
    assert processor.LEVELS[asked].features <= processor.features()
    assert ("avx512f" in processor.features()) == (asked == "avx512")


def test_levels_of_another_system_are_not_known(told: pytest.MonkeyPatch) -> None:
    told.setattr(Path, "read_text", lambda path, **options: ARM)
    told.setenv("FXKIT_CPU_LEVEL", "baseline")
    with pytest.raises(UnsupportedError, match="unknown CPU has none that is known"):
        processor.march()
