"""Software prefetch: the text that asks for a line of memory."""

from __future__ import annotations

# Where vectors are short, and on AMD's processors, only what is read is asked for, and for the
# second cache: on EPYCs a norm takes two thirds, a gradient of a softmax half, and a transposed sum
# three quarters, of what asking for all of it in the first cache makes them take. Lines that lie a
# power of two apart replace each other there before their turn.
PREFETCHES = """\
#if defined(__AVX512F__) && !defined(__znver3__) && !defined(__znver4__) && !defined(__znver5__)
#define FX_ASK(line) __builtin_prefetch(line, 0)
#define FX_ASK_TO_WRITE(line) __builtin_prefetch(line, 1)
#else
#define FX_ASK(line) __builtin_prefetch(line, 0, 2)
#define FX_ASK_TO_WRITE(line)
#endif
"""


def prefetch(line: str, is_output: bool) -> str:
    """Return the statement that asks for a line of memory.

    Args:
        line: An address in it, as text.
        is_output: Whether it is going to be written.
    """
    return f"FX_ASK_TO_WRITE({line});" if is_output else f"FX_ASK({line});"
