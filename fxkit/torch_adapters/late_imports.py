"""Modules of torch that are imported late: all that one purpose needs, once, by one thread.

They import each other in circles. Where several threads import different ones of them first,
Python breaks the tie by handing out modules that are not yet complete, and the import fails.
"""

from __future__ import annotations

import contextlib
import importlib
import threading

IMPORTING = threading.RLock()
"""Held while a module of torch is imported for the first time."""

FOR_SIZES = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.experimental.validator",
    "torch._inductor.sizevars",
    "torch.export._trace",
    "sympy.tensor.tensor",
)
"""What symbolic sizes need: torch imports some of it when the first of them is used."""

FOR_GRAPHS_OF_GRADIENTS = (
    *FOR_SIZES,
    "torch.fx.experimental.proxy_tensor",
    "torch._subclasses.schema_check_mode",
    "torch._inductor.compiler_bisector",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch._functorch.aot_autograd",
    "torch._functorch.partitioners",
    "torch._inductor.pattern_matcher",
    "functorch.compile",
)
"""What functional graphs and those of gradients need."""

FOR_CONTROL_OPERATORS = ("torch._dynamo.convert_frame",)
"""What `torch.cond` and its like need in eager; with it comes Triton, where that is installed."""

FOR_CHECKPOINTS = ("torch._dynamo",)
"""What torch imports at the first checkpoint of activations."""

_imported: set[tuple[str, ...]] = set()


def import_at_once(names: tuple[str, ...]) -> None:
    """Import modules unless that has been done; other threads wait until all of them are there.

    Args:
        names: One of the tuples above. What this torch lacks is passed over: it does without.
    """
    if names in _imported:
        return
    with IMPORTING:
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        _imported.add(names)
