"""Faults in single kernels: torch computes their nodes, and one warning names them.

A row of an operator may raise, a printer too, and a compiler may refuse what was printed. None of
that is an answer about the program, as `Unfusable` is, and none of it is a reason to give up the
kernels of other regions.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from torch import fx

from fxkit.analysis.operator_names import shown_operator
from fxkit.errors import FxkitError
from fxkit.ir.provenance import source_of

REPORT = "Please report it with this message and what `python -m fxkit doctor` prints."

# So many nodes of a fault are named, and so many faults are shown in full.
_NAMED, _SHOWN = 4, 3

_warned: set[tuple[str, ...]] = set()


@dataclass(frozen=True)
class KernelFault:
    """What failed, and where.

    Attributes:
        nodes: The nodes whose kernel it is, in graph order.
        error: What was raised.
    """

    nodes: tuple[fx.Node, ...]
    error: Exception

    @property
    def reason(self) -> str:
        """Why torch computes the nodes, as a line."""
        if isinstance(self.error, FxkitError):
            return self.error.message
        return f"its kernel could not be made: {type(self.error).__name__}: {self.error}"

    @property
    def key(self) -> str:
        """The same for the same fault at other sizes and numbers of nodes."""
        where = sorted({f"{shown_operator(node)} {source_of(node)}" for node in self.nodes})
        return f"{where} {type(self.error).__name__}"

    def __str__(self) -> str:
        names = ", ".join(f"%{node.name}" for node in self.nodes[:_NAMED])
        more = f" and {len(self.nodes) - _NAMED} more" if len(self.nodes) > _NAMED else ""
        lines = [f"nodes: {names}{more}"]
        sources = dict.fromkeys(str(s) for node in self.nodes if (s := source_of(node)))
        lines += [f"from:  {source}" for source in list(sources)[:1]]
        told = self.error if isinstance(self.error, FxkitError) else self.reason
        lines += f"fault: {told}{_place(self.error)}".splitlines()
        return "\n".join(f"  {line}" for line in lines)


class KernelFaults:
    """Takes note of what fails while the kernels of one graph are made."""

    def __init__(self) -> None:
        self._found: list[KernelFault] = []

    def note(self, nodes: Sequence[fx.Node], error: Exception) -> str:
        """Take note of a fault, and return why torch computes the nodes."""
        fault = KernelFault(tuple(nodes), error)
        self._found.append(fault)
        return fault.reason

    def warn(self) -> None:
        """Warn of all faults at once, unless that was done for the same at other sizes."""
        key = tuple(sorted({fault.key for fault in self._found}))
        if not key or key in _warned:
            return
        _warned.add(key)
        count = len(self._found)
        shown = [str(fault) for fault in self._found[:_SHOWN]]
        shown += [f"  and {count - _SHOWN} more"] if count > _SHOWN else []
        what = "a region has" if count == 1 else f"{count} regions have"
        details = "\n".join(shown)
        warnings.warn(
            f"expected to make a kernel for each region, but {what} none:\n{details}\n"
            "  Torch computes these nodes, and all others are compiled. Unless the row of an "
            f"operator is your own, this is a fault of fxkit, not of the program. {REPORT}",
            stacklevel=2,
        )


def _place(error: Exception) -> str:
    """Return the line that raised; a compiler's error says itself where it is."""
    if isinstance(error, FxkitError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    return f" ({PurePath(last.filename).name}:{last.lineno} in {last.name})"
