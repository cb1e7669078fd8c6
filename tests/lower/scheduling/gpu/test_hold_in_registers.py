"""What several sweeps read is loaded once."""

from __future__ import annotations

from fxkit.lower.scheduling.gpu.hold_in_registers import HoldInRegisters
from tests.lower.scheduling.nests import before_and_after, centred, summed


def test_a_row_that_is_read_twice_is_loaded_once() -> None:
    before, after = before_and_after(centred(3, 64), HoldInRegisters)
    assert str(before).count("load in0") == 2
    assert str(after).count("load in0") == 1
    assert "f32 k0[n][l]" in str(after)
    assert "k0 = %0" in str(after)
    assert "%0: f32 = k0" in str(after)


def test_a_row_that_is_read_once_or_walked_is_not_held() -> None:
    for kernel in (summed(3, 64), centred(2, 33_000)):
        before, after = before_and_after(kernel, HoldInRegisters)
        assert after == before
