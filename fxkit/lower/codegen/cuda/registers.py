"""Register caching: what the threads of a row keep from one row sweep to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxkit.lower.codegen.cuda.layout import Layout
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.scheduling.row_sweeps import Schedule, schedule

# Bytes of registers that a multiprocessor has, and of those that one thread may have.
_REGISTERS, _OWN = 256 * 1024, 512

# A register has four bytes, whatever lies in it.
_REGISTER = 4


@dataclass(frozen=True)
class Held:
    """Values that are held.

    Attributes:
        room: Bytes of a row that computed values may take together.
        spans: Value → the passes that compute it, and that read it last.
    """

    room: int = 0
    spans: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def values(self) -> list[int]:
        """The values, in order."""
        return sorted(self.spans)

    def is_kept(self, value: int, number: int) -> bool:
        """Tell whether a pass puts a value into registers."""
        return value in self.spans and self.spans[value][0] == number

    def is_known(self, value: int, number: int) -> bool:
        """Tell whether a pass finds a value in registers."""
        return value in self.spans and self.spans[value][0] < number


def held_in_registers(kernel: Kernel, layout: Layout) -> Held:
    """Return what is held of a row, as far as half of the registers go."""
    if not layout.items:
        return Held()
    elements = layout.items * layout.width
    share = min(_OWN, _REGISTERS // layout.threads) // 2 // elements
    room = share * elements * layout.group
    plan = schedule(kernel, room)
    spans = {value: _span(plan, value) for value in plan.buffers}
    for value, instruction in enumerate(kernel.body):
        first, last = _span(plan, value)
        if instruction.op != "load" or not plan.wide[value] or first == last:
            continue
        wider = {**spans, value: (first, last)}
        if _most(kernel, wider) <= share:
            spans = wider
    return Held(room, spans)


def _span(plan: Schedule, value: int) -> tuple[int, int]:
    """Return the first and the last pass that need a value."""
    needed = [n for n, one in enumerate(plan.passes) if value in (*one.values, *one.buffered)]
    return (needed[0], needed[-1]) if needed else (0, 0)


def _most(kernel: Kernel, spans: Mapping[int, tuple[int, int]]) -> int:
    """Return the bytes of an element's values that are held at once, at most."""
    last = max(end for _, end in spans.values())
    return max(
        sum(
            max(_REGISTER, kernel.body[value].dtype.itemsize)
            for value, (begin, end) in spans.items()
            if begin <= border < end
        )
        for border in range(last)
    )
