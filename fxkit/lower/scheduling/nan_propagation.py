"""Which maxima and minima may ignore NaN, since what is computed from them is NaN anyway.

A softmax has one: where its row has a NaN, an exponential is NaN, so their sum is, and with it each
result, whatever the maximum was taken to be.
"""

from __future__ import annotations

from fxkit.lower.loop_ir.loop_ir import Instruction, Kernel

_EXTREMA = frozenset({"reduce_max", "reduce_min"})
# What is NaN where one of its operands is.
_STRICT = frozenset("add sub mul div fma neg abs exp log sqrt cast round reduce_add".split())
# What has other effects than its value.
_EFFECTS = frozenset({"load", "index", "check"})


def nan_insensitive(kernel: Kernel) -> frozenset[int]:
    """Return the extrema that lead to nothing but NaN where their row has one."""
    extrema = [p for p, i in enumerate(kernel.body) if i.op in _EXTREMA and _is_float(i)]
    return frozenset(p for p in extrema if _is_told(kernel, p))


def _is_told(kernel: Kernel, extremum: int) -> bool:
    led_to = {extremum}
    # Values that are NaN where the row is, and those that are NaN all along the row: what is
    # computed of the latter goes by them, whatever number the extremum is.
    there, everywhere = set(kernel.body[extremum].operands), set[int]()
    for position, instruction in enumerate(kernel.body):
        operands = set(instruction.operands)
        if (led_to - everywhere) & operands:
            led_to.add(position)
            if instruction.op in _EFFECTS:
                return False
        if instruction.op not in _STRICT or not _is_float(instruction):
            continue
        if operands & everywhere or (instruction.is_reduction and operands & there):
            everywhere.add(position)
        elif operands & there:
            there.add(position)
    return all(store.value in everywhere for store in kernel.stores if store.value in led_to)


def _is_float(instruction: Instruction) -> bool:
    return instruction.dtype.is_floating_point
