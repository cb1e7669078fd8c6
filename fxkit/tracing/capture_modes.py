"""Capture a program by running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxkit.errors import UnsupportedError
from fxkit.torch_adapters.late_imports import FOR_GRAPHS_OF_GRADIENTS, FOR_SIZES, import_at_once
from fxkit.tracing.captured import Captured
from fxkit.tracing.held_programs import callable_of
from fxkit.tracing.recaptures import capture_error
from fxkit.tracing.recording.dynamic_inputs import Request
from fxkit.tracing.symbolic_capture import capture_symbolically

MODES = ("whole", "symbolic", "aten", "export", "partial")


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mode: str = "whole",
    dynamic: Request = None,
    train: bool = False,
    control_flow: bool = False,
) -> Any:
    """Get a whole graph out of a Python program, with guards that say when it holds.

    `whole` runs the program once on the given tensors and records the torch calls it makes. Numbers
    that the program reads out of tensors become guards inside the graph, the Python state that it
    reads is guarded, and what it writes there or prints is done again by each call. It runs once
    more where it calls functions that it keeps where they can't be found, and where a memoised one
    does at its first call what no graph can repeat. See `Captured` for what is guarded and what is
    not. `symbolic` follows the program with placeholders instead of tensors, as `symbolic_trace`
    does, and needs the arguments only to know their nesting.

    `aten` is `whole` with the graph brought into functional ATen: no writes, no views of inputs;
    with `train=True` also the graph of the gradients. `partial` lets Dynamo find graphs, with
    Python between them. `export` takes over a program that torch has exported, or exports a module.

    Args:
        fn: A function, `nn.Module`, bound method, or other callable. In mode `export` a module, an
            `ExportedProgram`, a TorchScript module, or the path of a file that holds one.
        args: Positional arguments, as a tuple; they may be nested. An `ExportedProgram` needs none.
        kwargs: Keyword arguments.
        mode: `whole`, `symbolic`, `aten`, `partial` or `export`.
        train: Whether to differentiate, in mode `aten`.
        dynamic: Whether one graph is to serve several sizes of the arguments' tensors. None: once a
            call differs from an earlier one in sizes only, a graph is captured in which those are
            free. True: all are free from the first. A dict frees some: for each argument, by name,
            an axis, a tuple of axes, or a dict whose keys are axes. False: none. What the program
            assumes of symbolic sizes becomes a guard, such as `x.shape[0] >= 2`. Where sizes can't
            be free, there is a graph for each. To make sizes symbolic, the program runs a second
            time, on the state that it found, and leaves nothing behind. Mode `export` takes what
            `torch.export.export` takes as `dynamic_shapes`, `partial` what `torch.compile` takes as
            `dynamic`. It has no effect in mode `aten`, where there is always a graph for each set
            of sizes.
        control_flow: Whether a branch on a tensor (`if x.sum() > 0:`) is to be one node with graphs
            for both sides, in mode `whole`. The program runs once for each way through its
            branches, and nothing of that is left behind. Where a side does more than to compute,
            raises, or gives other types than the other one, and where a loop may go on, the branch
            stays a guard; `explain` says why.

    Returns:
        The captured program, callable like `fn`: a `Captured`; in mode `aten` an `AtenCaptured`, in
        mode `partial` a `Partial`, in mode `export` an `Exported`.

    Raises:
        CaptureError: When the program can't be held in one graph; says which line and what to do.
        UnsupportedError: When there is no such mode, or `args` is not a tuple.

    Example:
        >>> import torch, fxkit
        >>> captured = fxkit.capture(lambda x: x.relu() + 1, (torch.ones(2),))
        >>> print(fxkit.graph(captured.graph_module))
        graph(%x: f32[2]):
          %relu: f32[2] = aten.relu(%x)
          %add: f32[2] = aten.add(%relu, 1)
          return %add
        >>> captured(torch.tensor([-1.0, 2.0])), captured.recaptures
        (tensor([1., 3.]), 0)
    """
    _check(fn, args, kwargs, mode)
    fn = fn if mode == "export" else callable_of(fn)
    if train and mode != "aten":
        raise UnsupportedError(
            f"expected mode 'aten' with train=True, got {mode!r}",
            hint="gradients flow through the other modes as they are",
        )
    if control_flow and mode != "whole":
        raise UnsupportedError(
            f"expected mode 'whole' with control_flow=True, got {mode!r}",
            hint="leave control_flow out: branches are followed and guarded",
        )
    if mode == "export":
        # Each of these modes is imported where it is asked for: few programs need more than one.
        import_at_once(FOR_SIZES)
        from fxkit.tracing.exported import capture_exported

        return capture_exported(fn, args, dict(kwargs or {}), dynamic)
    if mode == "partial":
        from fxkit.tracing.partial import capture_partially

        return capture_partially(fn, args, dict(kwargs or {}), dynamic)
    if mode == "symbolic":
        _check_symbolic(dynamic)
        return capture_symbolically(fn, args, kwargs or {})
    if mode == "aten":
        import_at_once(FOR_GRAPHS_OF_GRADIENTS)
        from fxkit.tracing.functional.aten_captured import AtenCaptured

        captured = AtenCaptured(fn, train=train)
    else:
        captured = Captured(fn, dynamic=dynamic, control_flow=control_flow)
    attempt = captured.capture_now(args, dict(kwargs or {}))
    if attempt.failure is not None:
        raise capture_error(attempt.failure)
    return captured


def _check_symbolic(dynamic: Any) -> None:
    if dynamic:
        raise UnsupportedError(
            "expected no dynamic in mode 'symbolic', got one",
            hint="leave it out: a graph that was captured without tensors knows no sizes",
        )


def _check(fn: Any, args: Any, kwargs: Any, mode: str) -> None:
    if mode not in MODES:
        raise UnsupportedError(
            f"expected mode to be one of {', '.join(MODES)}, got {mode!r}",
            hint="leave it out to get 'whole'",
        )
    if not callable(fn) and mode != "export":
        raise UnsupportedError(
            f"expected something callable, got {type(fn).__name__}",
            hint="give a function or a module, and its arguments as a tuple",
        )
    if not isinstance(args, tuple):
        hint = "write (x,) for one argument" if isinstance(args, torch.Tensor) else "write (x, y)"
        raise UnsupportedError(f"expected args to be a tuple, got {type(args).__name__}", hint=hint)
    if kwargs is not None and not isinstance(kwargs, dict):
        raise UnsupportedError(
            f"expected kwargs to be a dict or None, got {type(kwargs).__name__}",
            hint="write {'name': value}",
        )
