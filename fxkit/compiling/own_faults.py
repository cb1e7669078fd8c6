"""Faults of fxkit itself inside `fxkit.compile`: left out with one warning, so programs run."""

from __future__ import annotations

import warnings

from fxkit.errors import FxkitError, PassError
from fxkit.lower.fusion.kernel_faults import REPORT
from fxkit.passes.base import Pass
from fxkit.passes.pipelines import LOWERING, LOWERING_FAST, LOWERING_TRAINING, TRAINING

_OWN_PASSES = (*LOWERING, *LOWERING_FAST, *LOWERING_TRAINING, *TRAINING)

_REPORT = f"This is a fault of fxkit, not of the program. {REPORT}"


class OwnFaults:
    """Takes note of what failed in fxkit while one program was compiled, and warns of each once."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def leaves_out(self, current: Pass, error: PassError) -> bool:
        """Tell whether to go on without a pass that failed, or without the rule in it that did.

        That is so of the passes that `fxkit.compile` runs by itself: others are the user's choice.
        """
        # No user chooses those of lowering.
        is_of_lowering = type(current).__module__.startswith("fxkit.lower.")
        if current not in _OWN_PASSES and not is_of_lowering:
            return False
        is_rule = error.rule not in (None, current.name)
        failed = f"the rule {error.rule} of " if is_rule else ""
        failed += f"the pass {current}"
        self.note(failed, error, "It is left out, and the program is compiled without it.")
        return True

    def note(self, failed: str, error: Exception, outcome: str) -> str:
        """Warn that something failed, unless that was done; return it as a line.

        Args:
            failed: What failed, as `the pass recompose`.
            error: What it raised.
            outcome: What became of it and of the program, as a sentence.
        """
        is_ours = isinstance(error, FxkitError)
        told = error.message if is_ours else f"{type(error).__name__}: {error}"
        if failed not in self._noted:
            self._noted.add(failed)
            shown = str(error) if is_ours else told
            warnings.warn(f"{failed} failed: {shown}\n  {outcome} {_REPORT}", stacklevel=2)
        return f"{failed} failed: {told}"
