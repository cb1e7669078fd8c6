"""What a program does that placeholders can't follow, and what to do instead."""

from __future__ import annotations

import traceback

import torch
from torch.fx.proxy import TraceError

from fxkit.errors import CaptureError, FxkitError
from fxkit.torch_adapters.layers import backward_hooks_of, backward_pre_hooks_of
from fxkit.tracing.environment.object_kinds import global_hooks
from fxkit.tracing.recorder.frames import is_user_file, source_text

_REMEDIES = (
    (
        "control flow",
        "an `if`, `while`, `and`, `not` or `assert` on a traced value",
        "use fxkit.capture(fn, args), which runs the program and guards the branch, "
        "or give the value in concrete_args",
    ),
    (
        "iterated",
        "a loop over a traced value, or a `*` of it",
        "use fxkit.capture(fn, args), or give the value in concrete_args",
    ),
    (
        "'len' is not supported",
        "len() of a traced value",
        "use value.shape[0], or fxkit.capture(fn, args)",
    ),
    (
        "argument of type",
        "a traced value inside an object that a graph can't hold",
        "pass its tensors one by one, or use fxkit.capture(fn, args)",
    ),
    (
        "not installed as a submodule",
        "a call of a module that it does not hold",
        "assign that module to an attribute of the traced one",
    ),
    (
        "not a member of this module",
        "a parameter that it does not hold",
        "assign that parameter to an attribute of the traced module",
    ),
    (
        "transform API",
        "a call of torch.func, which looks for tensors",
        "use fxkit.capture(fn, args), which records what is left below the transforms",
    ),
    (
        "vmap(",
        "a call of torch.vmap, which looks for tensors",
        "use fxkit.capture(fn, args), which records what is left below the transforms",
    ),
)
_KNOWN = (TraceError, RuntimeError, NotImplementedError, NameError, ValueError)
_OTHER_REMEDY = (
    "an operation that a placeholder can't stand in for",
    "use fxkit.capture(fn, args), which runs the program on real tensors",
)


def explained(error: Exception, name: str) -> FxkitError:
    """Return the error that says why a program can't be followed, where, and what to do.

    Args:
        error: What following it raised.
        name: What the message calls the program.
    """
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_user_file(frame.filename)
    ]
    if isinstance(error, FxkitError):
        return error
    what, hint = _OTHER_REMEDY
    if isinstance(error, _KNOWN):
        for sign, meaning, remedy in _REMEDIES:
            if sign in str(error):
                what, hint = meaning, remedy
    detail = "" if isinstance(error, TraceError) else f" ({type(error).__name__}: {error})"
    line = frames[-1] if frames else None
    source = None
    if line is not None:
        source = source_text(f'File "{line.filename}", line {line.lineno}, in {line.name}')
        source = f"{source}: {line.line}" if line.line else source
    return CaptureError(
        f"expected {name} to run on placeholders, got {what}{detail}", source=source, hint=hint
    )


def refuse_hooks(module: torch.nn.Module, followed: str) -> None:
    """Refuse hooks that no placeholder gets to see, or that run again when the graph does.

    Args:
        module: A module that is called.
        followed: What messages call it where its code is followed; "" where it stays a call.

    Raises:
        CaptureError: When there are such hooks.
    """
    full, _ = global_hooks()
    at_calls = [path for _, path in full if not path.endswith("_registration_hooks")]
    if at_calls:
        found = f"{at_calls[0]}, which run at calls of all modules"
    elif followed and (backward_hooks_of(module) or backward_pre_hooks_of(module)):
        found = f"those of {followed} for gradients"
    else:
        return
    raise CaptureError(
        f"expected no hooks but those for the results of modules, got {found}",
        hint="remove the hooks while it is traced, or use fxkit.capture(fn, args)",
    )
