"""A call of a program that is recorded, once or several times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fxkit.tracing.guarding import guards as g
from fxkit.tracing.recorder.earlier_content import EarlierContent
from fxkit.tracing.recording.state import Learned


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call of a program that is to be recorded.

    Attributes:
        fn: The program.
        args: Its arguments.
        kwargs: Its keyword arguments.
        call: The same as guards see them, taken apart before the first recording.
        learned: What is known of the program.
        earlier: Keeps what tensors hold before they are written to, where the run may have to be
            taken back.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: g.GuardedCall
    learned: Learned
    earlier: EarlierContent | None = None
