"""The processor is described from what Linux tells of it, and by nothing elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fxkit import processor

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
