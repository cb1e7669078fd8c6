"""Memory that compiled programs keep for their next call."""

from __future__ import annotations

from dataclasses import dataclass

from fxkit.lower.runtime import binding


@dataclass(frozen=True)
class MemoryStats:
    """The memory that compiled programs hold, besides inputs and parameters.

    Attributes:
        used_bytes: In use: scratch memory of running calls, and results that are still alive.
        peak_bytes: The most that has been in use at one time.
        kept_bytes: Kept for the next call.
        limit_bytes: Bound on what is kept; `FXKIT_POOL_MB` sets it.
        reused: How often a block was found among those that are kept.
        fresh: How often a new one was asked of the system.
        dropped: How often one was given back to the system because the bound was reached.
    """

    used_bytes: int
    peak_bytes: int
    kept_bytes: int
    limit_bytes: int
    reused: int
    fresh: int
    dropped: int


def memory_stats() -> MemoryStats:
    """Return what memory compiled programs hold; all zeros before the first one is compiled.

    Results of a mebibyte and more, and all scratch memory, come from blocks that are kept when they
    are given back. A result gives its block back when its storage dies, with all views of it.
    Smaller results are torch's own memory and not counted.

    Returns:
        The numbers of this process, over all threads.

    Example:
        >>> import fxkit
        >>> fxkit.memory_stats().kept_bytes >= 0
        True
    """
    native = binding.loaded()
    return MemoryStats(*(native.memory_statistics() if native is not None else (0,) * 7))


def trim() -> int:
    """Give all memory that is kept for later calls back to the system.

    Memory in use is not touched. Call it after a burst of large calls.

    Returns:
        The bytes that were given back.

    Example:
        >>> import fxkit
        >>> fxkit.trim() >= 0
        True
    """
    native = binding.loaded()
    return 0 if native is None else native.trim_memory()
