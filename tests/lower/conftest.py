"""Fixtures for what is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from fxkit.tracing.captured import Captured


@pytest.fixture
def slow_ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls that the quick way did not take."""
    calls: list[int] = []
    real = Captured.__call__

    def counted(self: Captured, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Captured, "__call__", counted)
    return calls
