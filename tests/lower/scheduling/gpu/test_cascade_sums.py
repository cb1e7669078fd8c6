"""In what float32 is summed."""

from __future__ import annotations

from fxkit.lower.scheduling.gpu.cascade_sums import CascadeSums
from tests.lower.scheduling.nests import before_and_after, centred, summed


def test_few_numbers_are_summed_in_float32() -> None:
    before, after = before_and_after(summed(3, 64), CascadeSums)
    assert "f64 a1" in str(before)
    assert "f32 a1" in str(after)


def test_lanes_are_summed_in_float32_before_float64() -> None:
    _, after = before_and_after(summed(300, 33_000), CascadeSums)
    assert (
        """\
      for j_tile from t < 8250 step 512 unroll 4:
        f32 c1
        c1 = neutral element of add
        j = j_tile * 4
        lanes l < 4:
          %0: f32 = load in0[33000, 1]
          c1 = add(c1, %0)
        a1 = add(a1, c1)
""".replace("\n      ", "\n    ").removeprefix("  ")
        in str(after)
    )


def test_maxima_and_columns_stay_as_they_are() -> None:
    for kernel in (centred(300, 33_000), summed(64, 40, down=True)):
        before, after = before_and_after(kernel, CascadeSums)
        assert after == before
