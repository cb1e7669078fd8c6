"""Lanes that lie together are read and written together."""

from __future__ import annotations

from fxkit.lower.scheduling.gpu.vectorise_accesses import VectoriseAccesses
from tests.lower.scheduling.nests import before_and_after, doubled, summed


def test_loads_and_stores_of_lanes_are_vectors() -> None:
    _, after = before_and_after(doubled(6), VectoriseAccesses)
    assert str(after).endswith("""\
      f32 m0[l]
      m0 = 4 lanes of %0
      f32 o0[l]
      lanes l < 4 if l < count:
        %0: f32 = m0
        %2: f32 = mul %0, 2.0
        o0 = %2
      store out0[1] %2 as 4 lanes of o0""")


def test_a_store_of_some_threads_stays_theirs() -> None:
    _, after = before_and_after(summed(64, 40, down=True), VectoriseAccesses)
    assert str(after).endswith("""\
      if is_inside:
        if t == 0:
          store out0[1, 0] %1 as 4 lanes of o0""")


def test_elements_stay_elements() -> None:
    before, after = before_and_after(doubled(6), VectoriseAccesses, is_aligned=False)
    assert after == before
