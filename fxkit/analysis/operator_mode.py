"""The base of modes that see the operators which run, at no cost but that."""

from __future__ import annotations

from fxkit.torch_adapters.modes import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """A `TorchDispatchMode` that does not import TorchDynamo.

    torch 2.13 wraps what a mode does to hide it from TorchDynamo, and imports all of that for it at
    the first operator: two seconds and more, in a process that may never need it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
