"""Rows whose softmax may run as a speculative single pass; see `speculate_softmax`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fxkit import cpu_info
from fxkit.lower.codegen.cpp.float16_rows import Float16Rows
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuSchedule, SpeculativeSoftmax
from fxkit.lower.scheduling.cpu.speculate_softmax import NEAR
from fxkit.lower.scheduling.row_sweeps import RowSweep

# So many powers have a sum in float32, and 8 such sums; theirs are summed in float64. A lane adds
# at most 16 powers of a block: 8 lanes those of the longer one; 4, of SSE or NEON, half as many.
_BLOCK, _BLOCK_OF_FEW_LANES = 128, 32


def _block_size() -> int:
    """Return how many powers have a sum of their own on this processor."""
    return _BLOCK if "avx" in cpu_info.features() else _BLOCK_OF_FEW_LANES


class SoftmaxWithoutMaximum(Float16Rows, ABC):
    """Prints the two sweeps of such a softmax, and the one that is tried before them.

    In the text, `is_near3` says whether maximum 3 was near zero in the last row that a thread had,
    and then in this one, `is_early3` whether the powers that are summed are those of the sweep that
    was tried.

    Args:
        schedule: How the kernel is computed.
        name: Name of the function.
    """

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        super().__init__(schedule, name)
        self._undiminished: SpeculativeSoftmax | None = None  # whose powers are taken early
        # The softmaxes whose powers are taken early, by each of the two sweeps of theirs.
        self._early = {one: early for early in schedule.speculative for one in early.original}

    @abstractmethod
    def _along_row(self, one: RowSweep) -> None:
        """Print the loops of a sweep over a row, once its accumulators are declared."""

    @abstractmethod
    def _row_loops(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        """Print the loops of a sweep over a part of a row."""

    @property
    def _expectations(self) -> list[str]:
        """The names of what a row tells the next one."""
        return [f"is_near{maximum}" for maximum in {e.maximum: e for e in self._early.values()}]

    def _declare_expectations(self) -> None:
        for name in self._expectations:
            self._add(f"bool {name} = true;")

    def _workshare_clause(self) -> str:
        names = ", ".join(self._expectations)
        return super()._workshare_clause() + (f" firstprivate({names})" if names else "")

    def _early_sweep(self, one: RowSweep, early: SpeculativeSoftmax) -> None:
        """Print one of the two sweeps, before the first one also that which is tried."""
        if one == early.original[0]:
            self._try_early(early)
        else:
            self._take_again(early)

    def _try_early(self, early: SpeculativeSoftmax) -> None:
        maximum, is_near = f"v{early.maximum}", f"is_near{early.maximum}"
        self._declare_accumulators(early.both)
        self._open(f"if ({is_near}) {{")
        self._undiminished = early
        self._along_powers(early.both, early)
        self._undiminished = None
        self._close()
        self._open("else {")
        self._along_row(early.first)
        self._close()
        scale = "" if early.scale is None else f" * {self._ref(early.scale)}"
        self._add(f"const bool was_near{early.maximum} = {is_near};")
        self._add(f"{is_near} = __builtin_fabsf({maximum}{scale}) < {NEAR}f;")
        self._add(f"const bool is_early{early.maximum} = was_near{early.maximum} && {is_near};")
        self._add(f"{maximum} = {is_near} ? 0.0f : {maximum};")

    def _take_again(self, early: SpeculativeSoftmax) -> None:
        self._open(f"if (!is_early{early.maximum}) {{")
        self._add(f"t{early.total} = 0;")
        self._along_powers(early.second, early)
        self._close()

    def _along_powers(self, one: RowSweep, early: SpeculativeSoftmax) -> None:
        """Print the loops of a sweep that sums powers.

        Those of a row may all be the same, and none a whole number. So few are added one after the
        other: sums of blocks, then sums of those.
        """
        length, total, depth = self._kernel.row_sizes[-1], early.total, self._depth
        block = _block_size()
        chunk = 8 * block
        self._parts, self._is_in_double = (), False
        begin: str | int = 0
        end: str | int = length
        if early.maximum in one.reductions:
            self._open_fold(early.maximum)
        if is_runtime(length) or length > chunk:
            begin, end = self._open_pieces("chunk", begin, end, chunk)
        self._add(f"fx_floats sums{total} = fx_all(0.0f);")
        inner = self._depth
        if is_runtime(length) or length > block:
            begin, end = self._open_pieces("block", begin, end, block)
        self._open_fold(total)
        self._folds_apart = True
        self._row_loops(one, begin, end)
        self._folds_apart = False
        self._add(f"sums{total} += lanes{total};")
        while self._depth > inner:
            self._close()
        self._add(f"t{total} += fx_sum(sums{total});")
        while self._depth > depth:
            self._close()
        if early.maximum in one.reductions:
            self._close_fold(early.maximum)

    def _minuend(self, early: SpeculativeSoftmax) -> str:
        """Return the text of what there are powers of where nothing is subtracted."""
        value = self._ref(self._body(early.exponent).operands[0])
        return value if early.scale is None else f"{value} * {self._ref(early.scale)}"
