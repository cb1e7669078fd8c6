"""Rows whose softmax may run as a speculative single pass; see `speculate_softmax`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fxkit import cpu_info
from fxkit.lower.codegen.cpp.float16_rows import Float16Rows
from fxkit.lower.loop_ir.runtime_parameters import is_runtime
from fxkit.lower.scheduling.cpu.cpu_schedule import CpuSchedule, SpeculativeSoftmax
from fxkit.lower.scheduling.cpu.speculate_softmax import NEAR
from fxkit.lower.scheduling.row_sweeps import RowSweep

# So many exponentials have a sum in float32, and 8 such sums; theirs are summed in float64. A lane
# adds at most 16 of a block: 8 lanes those of the longer one; 4, of SSE or NEON, half as many.
_BLOCK, _BLOCK_OF_FEW_LANES = 128, 32


def _block_size() -> int:
    """Return how many exponentials have a sum of their own on this processor."""
    return _BLOCK if "avx" in cpu_info.features() else _BLOCK_OF_FEW_LANES


class SoftmaxWithoutMaximum(Float16Rows, ABC):
    """Prints the two sweeps of such a softmax, and the one that is tried before them.

    In the text, `is_near3` says whether maximum 3 was near zero in the last row that a thread had,
    and then in this one, `is_early3` whether the exponentials that are summed are those of the
    sweep that was tried.

    Args:
        schedule: How the kernel is computed.
        name: Name of the function.
    """

    def __init__(self, schedule: CpuSchedule, name: str) -> None:
        super().__init__(schedule, name)
        self._speculated: SpeculativeSoftmax | None = None  # whose loops are printed
        # Each of them, by each of its two sweeps.
        self._speculative = {
            one: softmax for softmax in schedule.speculative for one in softmax.original
        }

    @abstractmethod
    def _along_row(self, one: RowSweep) -> None:
        """Print the loops of a sweep over a row, once its accumulators are declared."""

    @abstractmethod
    def _row_loops(self, one: RowSweep, begin: str | int, end: str | int) -> None:
        """Print the loops of a sweep over a part of a row."""

    @property
    def _expectations(self) -> list[str]:
        """The names of what a row tells the next one."""
        return [
            f"is_near{maximum}" for maximum in {e.maximum: e for e in self._speculative.values()}
        ]

    def _declare_expectations(self) -> None:
        for name in self._expectations:
            self._add(f"bool {name} = true;")

    def _workshare_clause(self) -> str:
        names = ", ".join(self._expectations)
        return super()._workshare_clause() + (f" firstprivate({names})" if names else "")

    def _speculative_sweep(self, one: RowSweep, softmax: SpeculativeSoftmax) -> None:
        """Print one of the two sweeps, before the first one also that which is tried."""
        if one == softmax.original[0]:
            self._speculate(softmax)
        else:
            self._take_exponentials_again(softmax)

    def _speculate(self, softmax: SpeculativeSoftmax) -> None:
        maximum, is_near = f"v{softmax.maximum}", f"is_near{softmax.maximum}"
        self._declare_accumulators(softmax.both)
        self._open(f"if ({is_near}) {{")
        self._speculated = softmax
        self._sum_exponentials(softmax.both, softmax)
        self._speculated = None
        self._close()
        self._open("else {")
        self._along_row(softmax.first)
        self._close()
        scale = "" if softmax.scale is None else f" * {self._ref(softmax.scale)}"
        self._add(f"const bool was_near{softmax.maximum} = {is_near};")
        self._add(f"{is_near} = __builtin_fabsf({maximum}{scale}) < {NEAR}f;")
        self._add(f"const bool is_early{softmax.maximum} = was_near{softmax.maximum} && {is_near};")
        self._add(f"{maximum} = {is_near} ? 0.0f : {maximum};")

    def _take_exponentials_again(self, softmax: SpeculativeSoftmax) -> None:
        self._open(f"if (!is_early{softmax.maximum}) {{")
        self._add(f"t{softmax.total} = 0;")
        self._sum_exponentials(softmax.second, softmax)
        self._close()

    def _sum_exponentials(self, one: RowSweep, softmax: SpeculativeSoftmax) -> None:
        """Print the loops of a sweep that sums exponentials.

        Those of a row may all be the same, and none a whole number. So few are added one after the
        other: sums of blocks, then sums of those.
        """
        length, total, depth = self._kernel.row_sizes[-1], softmax.total, self._depth
        block = _block_size()
        chunk = 8 * block
        self._parts, self._is_in_double = (), False
        begin: str | int = 0
        end: str | int = length
        if softmax.maximum in one.reductions:
            self._open_fold(softmax.maximum)
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
        if softmax.maximum in one.reductions:
            self._close_fold(softmax.maximum)

    def _minuend(self, softmax: SpeculativeSoftmax) -> str:
        """Return the text of what there are powers of where nothing is subtracted."""
        value = self._ref(self._body(softmax.exponent).operands[0])
        return value if softmax.scale is None else f"{value} * {self._ref(softmax.scale)}"
