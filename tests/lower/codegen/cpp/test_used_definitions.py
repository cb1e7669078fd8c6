"""The definitions that are left out before kernels."""

from __future__ import annotations

import pytest

from fxkit.lower.codegen.cpp import lane_text, vector_math
from fxkit.lower.codegen.cpp.used_definitions import used_definitions

TEXT = """\
#define FX_INLINE static inline __attribute__((always_inline))
#define FX_TWICE(x) \\
  fx_doubled(x)
#ifdef __AVX2__
// What two are.
FX_INLINE float fx_doubled(float x) { return x + x; }
#else
FX_INLINE float fx_doubled(float x) { return fx_scaled(x, 2.0f); }
template <class T>
FX_INLINE T fx_scaled(T x, T scale) {
  return fx_scales[0] * x * scale;
}
#endif
alignas(64) static const float fx_scales[2] = {
    1.0f, 2.0f,
};
typedef float fx_float_type;
struct fx_kept {
  fx_float_type x;
};
FX_INLINE float fx_alone(float x) {
  return "fx_{"[0] + x;
}
"""
ALWAYS = (
    "#ifdef __AVX2__\n#else\n#endif\n"
    "typedef float fx_float_type;\nstruct fx_kept {\n  fx_float_type x;\n};"
)


@pytest.mark.parametrize(
    ("use", "names"),
    [
        ("", set()),
        ("fx_alone(x)", {"FX_INLINE", "fx_alone"}),
        ("fx_doubled(x)", {"FX_INLINE", "fx_doubled", "fx_scaled", "fx_scales"}),
        ("fx_scaled(x, y)", {"FX_INLINE", "fx_scaled", "fx_scales"}),
        ("fx_scales", {"fx_scales"}),
        ("FX_TWICE(x)", {"FX_INLINE", "FX_TWICE", "fx_doubled", "fx_scaled", "fx_scales"}),
        ("fx_double", set()),
    ],
)
def test_what_is_named_and_what_that_names_stay(use: str, names: set[str]) -> None:
    found = used_definitions([TEXT], [use])
    every = {"FX_INLINE", "FX_TWICE", "fx_doubled", "fx_scaled", "fx_scales", "fx_alone"}
    assert {name for name in every if name in found} == names
    if not names:
        assert found == ALWAYS


def test_all_that_is_used_stays_as_it_is() -> None:
    assert used_definitions([TEXT], ["FX_TWICE fx_alone"]) + "\n" == TEXT


@pytest.mark.parametrize("text", [lane_text.LANES, vector_math.BASICS])
def test_definitions_are_found_in_our_own_texts(text: str) -> None:
    used = used_definitions([text], [])
    assert "FX_INLINE" not in used
    assert (
        used.count("#if") == used.count("#endif") == text.count("#if") - text.count("#ifdef __cl")
    )
