"""Parameters and buffers as they were: a pass may write to them, which no journal tells.

Nor does one tell of a module or parameter that a pass put in another's place by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx

from fxkit.passes.base import Pass
from fxkit.passes.manager.instruments import Instrument
from fxkit.passes.manager.records import PassRecord
from fxkit.torch_adapters.layers import buffers_of, children_of, parameters_of

Values = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Name → a parameter or buffer, and a copy of its value."""


def values_of(gm: torch.nn.Module) -> Values:
    """Copy what the parameters and buffers of a module hold. Cost: their memory once more."""
    named = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
    return {
        name: (tensor, tensor.detach().clone())
        for name, tensor in named.items()
        if tensor.layout == torch.strided and not tensor.is_meta
    }


def written_since(before: Values) -> tuple[str, ...]:
    """Return the names of what holds another value than the copy."""
    return tuple(name for name, (tensor, value) in before.items() if not _is_same(tensor, value))


def put_back(before: Values) -> None:
    """Write the copies back where something else stands now."""
    with torch.no_grad():
        for name in written_since(before):
            tensor, value = before[name]
            tensor.copy_(value)


def _is_same(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    tensor = tensor.detach()
    if torch.equal(tensor, value):
        return True
    return bool(((tensor == value) | ((tensor != tensor) & (value != value))).all())


Tables = list[tuple[str, dict[str, Any], dict[str, Any]]]
"""Path of a module with a dot, a table of its parameters, buffers or modules, and what it held."""


def tables_of(gm: torch.nn.Module) -> Tables:
    """Note which parameters, buffers and modules a module and those in it have."""
    return [
        (f"{path}." if path else "", table, dict(table))
        for path, module in gm.named_modules()
        for table in cast("tuple[dict[str, Any], ...]",
                          (parameters_of(module), buffers_of(module), children_of(module)))
    ]  # fmt: skip


def exchanged_since(before: Tables) -> tuple[str, ...]:
    """Return the names under which something else lies than was noted, or nothing."""
    return tuple(
        path + name
        for path, table, held in before
        for name, value in held.items()
        if table.get(name) is not value
    )


def exchange_back(before: Tables) -> None:
    """Let what was noted lie under its name again; what came beside it stays."""
    for _, table, held in before:
        table.update({name: value for name, value in held.items() if table.get(name) is not value})


class StateHistory(Instrument):
    """What the parameters and buffers of a module held after each pass.

    Args:
        gm: The module, before the first pass. Copies of it share its parameters.

    Attributes:
        start: What they held then.
        steps: For each pass that ran, the names of those that it wrote to.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.start = values_of(gm)
        self.steps: list[tuple[str, ...]] = []
        self._states: list[dict[str, torch.Tensor]] = [{}]

    def after(self, current: Pass, record: PassRecord, gm: fx.GraphModule) -> None:
        """Note what a pass wrote to."""
        latest = self._states[-1]
        known = {name: (t, latest.get(name, value)) for name, (t, value) in self.start.items()}
        self.steps.append(written_since(known))
        fresh = {name: self.start[name][0].detach().clone() for name in self.steps[-1]}
        self._states.append({**latest, **fresh})

    @contextlib.contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Let them hold what they held after so many passes."""
        now = {name: (t, t.detach().clone()) for name, (t, _) in self.start.items()
               if self._states[-1].get(name) is not None}  # fmt: skip
        then = self._states[min(step, len(self._states) - 1)]
        put_back({name: (t, then.get(name, self.start[name][1])) for name, (t, _) in now.items()})
        try:
            yield
        finally:
            put_back(now)
