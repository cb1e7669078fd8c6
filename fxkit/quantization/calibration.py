"""All of it in one call, and calibration over many batches."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from fxkit.errors import UnsupportedError
from fxkit.quantization.batches import (
    Batch,
    call_with,
    checked_batches,
    inputs_to_capture,
)
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.conversion import convert
from fxkit.quantization.preparation import (
    PreparedProgram,
    Program,
    as_config,
    as_prepared,
    prepare,
)
from fxkit.quantization.specs import QuantizationSpec


def calibrate(prepared: PreparedProgram, batches: Iterable[Batch], *, progress: bool = True) -> int:
    """Show batches to the observers of a program, without gradients.

    Args:
        prepared: What `prepare` returned.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs.
        progress: Whether to count them on a terminal.

    Returns:
        How many batches there were.

    Raises:
        UnsupportedError: When `prepared` or `batches` is something else.
    """
    count, prepared = 0, as_prepared(prepared)
    shows = progress and sys.stderr.isatty()
    with torch.no_grad():
        for count, batch in enumerate(checked_batches(batches), 1):
            call_with(prepared, batch)
            if shows:
                print(f"\rcalibrated with {count} batches", end="", file=sys.stderr, flush=True)
    if shows and count:
        print(file=sys.stderr)
    return count


def quantize(
    model: Any,
    config: QuantizationConfig | QuantizationSpec,
    batches: Iterable[Batch] = (),
    *,
    args: tuple[Any, ...] | None = None,
) -> Program:
    """Prepare, calibrate and convert a model.

    Args:
        model: A module, function, captured program or `torch.fx.GraphModule`.
        config: What is quantised, and how; a spec alone holds for all operators.
        batches: For each call a tuple of positional inputs, or a dict of keyword inputs; none are
            needed where no scale is found by calibration.
        args: Example inputs to capture with; the first batch when left out.

    Returns:
        The reference graph: `fxkit.compile` makes it fast.

    Raises:
        CaptureError: When the model is not one graph.
        UnsupportedError: When calibration is needed and there are no batches.
    """
    config = as_config(config)
    batches = list(checked_batches(batches))
    if not batches and args is None:
        raise UnsupportedError(
            "expected at least one batch, or args= to capture the model with, got neither",
            hint="quantize(model, spec, args=(x,)) where no scale is found by calibration",
        )
    inputs, keywords = inputs_to_capture(batches, args)
    prepared = prepare(model, inputs, config, kwargs=keywords)
    calibrate(prepared, batches, progress=False)
    return convert(prepared)
