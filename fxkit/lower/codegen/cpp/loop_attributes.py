"""What functions and loops tell a compiler beside what they compute."""

from __future__ import annotations

# Several vectors an iteration: a loop also writes a byte, or two, for each element; see
# `scheduling.cpu.unroll_and_jam`.
IN_STEP = """\
#ifdef __AVX2__
#define FX_STEPS(type, count) type steps[count]
#define FX_STEP(place) steps[place] = 1
#define FX_STEPPED() asm volatile("" : : "r"(steps) : "memory")
#ifdef __clang__
#define FX_SCHEDULED
#else
#define FX_SCHEDULED __attribute__((optimize("schedule-insns", "sched-pressure")))
#endif
#else
#define FX_SCHEDULED
#define FX_STEPS(type, count)
#define FX_STEP(place)
#define FX_STEPPED()
#endif
"""

# The compiler divides a loop with a condition that is the same for all elements into one for either
# outcome, and makes vector code of only one of the two where the loop has results besides what it
# stores. A loop with one such condition is divided in the text; those with several stay whole.
WHOLE_LOOPS = """\
#ifdef __clang__
#define FX_WHOLE_LOOPS
#else
#define FX_WHOLE_LOOPS __attribute__((optimize("no-unswitch-loops")))
#endif
"""
