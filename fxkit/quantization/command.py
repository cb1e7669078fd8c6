"""The command `python -m fxkit quantize model.pt2`: a file of its reference graph, and a report."""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxkit.errors import UnsupportedError
from fxkit.ir.writing import check_file, writing
from fxkit.quantization.batches import Batch
from fxkit.quantization.calibration import calibrate
from fxkit.quantization.conversion import convert
from fxkit.quantization.preparation import prepare
from fxkit.quantization.quantization_report import report
from fxkit.quantization.specs import (
    QuantizationSpec,
    bfloat16_weight_only,
    float8_weight_only,
    int4_dynamic,
    int4_weight_only,
    int8_dynamic,
    int8_static,
    int8_weight_only,
)

Loader = Callable[[Path], tuple[fx.GraphModule, tuple[Any, ...], dict[str, Any]]]

SPECS: dict[str, Callable[..., QuantizationSpec]] = {
    "int8_static": int8_static,
    "int8_dynamic": int8_dynamic,
    "int8_weight_only": int8_weight_only,
    "int4_dynamic": int4_dynamic,
    "int4_weight_only": int4_weight_only,
    "float8_weight_only": float8_weight_only,
    "bfloat16_weight_only": bfloat16_weight_only,
}


def add_command(commands: Any, load: Loader) -> None:
    """Add `quantize` to a command line.

    Args:
        commands: Where parsers of commands are added.
        load: Reads an exported program as a graph with its example inputs.
    """
    command = commands.add_parser("quantize", help="quantise an exported program, and report it")
    command.add_argument("file", type=Path, metavar="FILE.pt2", help="from torch.export.save")
    command.add_argument(
        "-o", "--output", type=Path, metavar="FILE.pt2", help="where the reference graph goes"
    )
    command.add_argument("--spec", choices=SPECS, default="int8_static", help="int8_static if none")
    command.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="elements that share a scale in weights of 4 bits; 128 if none",
    )
    command.add_argument(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FILE.safetensors",
        help="a batch to calibrate with, tensors by the names of inputs; may be repeated; the "
        "example inputs of the file if none",
    )
    command.set_defaults(run=lambda options: _quantize(options, load))


def _quantize(options: argparse.Namespace, load: Loader) -> int:
    spec = _spec(options)
    if options.output is not None:
        check_file(options.output)
    gm, args, kwargs = load(options.file)
    names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
    sizes = _sizes_that_vary(gm)
    batches = [_batch(path, names) for path in options.data] or [args or kwargs]
    if not batches[0]:
        raise UnsupportedError(
            f"expected example inputs in {options.file}, got none", hint="give --data"
        )
    if not options.data and spec.activations is not None and not spec.activations.is_dynamic:
        print("note: ranges are those of the example inputs in the file; --data gives others\n")
    with torch.no_grad():
        prepared = prepare(gm, args, spec, kwargs=kwargs)
        calibrate(prepared, batches)
        quantized = convert(prepared)
        print(report(quantized, prepared, batches))
        if options.output is not None:
            _write(quantized, args, kwargs, sizes, options.output)
            print(f"\n{options.output}")
    return 0


def _spec(options: argparse.Namespace) -> QuantizationSpec:
    if options.group_size is None:
        return SPECS[options.spec]()
    if not options.spec.startswith("int4"):
        raise UnsupportedError(
            f"expected --group-size with weights of 4 bits, got it with {options.spec}",
            hint="--spec int4_weight_only or int4_dynamic",
        )
    return SPECS[options.spec](options.group_size)


def _batch(path: Path, names: list[str]) -> Batch:
    """Read a batch: a tensor for each input, by name."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UnsupportedError(
            f"expected a file of safetensors, got {path}: {error}",
            hint="write one with safetensors.torch.save_file({name: tensor}, path)",
        ) from error
    if found.keys() != set(names):
        raise UnsupportedError(
            f"expected tensors named {names} in {path}, got {sorted(found)}",
            hint="name each tensor as the input of the program that it is for",
        )
    return tuple(found[name] for name in names)


_Sizes = dict[str, dict[int, Any] | None]


def _sizes_that_vary(gm: fx.GraphModule) -> _Sizes:
    """Return by inputs which sizes of an exported program vary, within which bounds."""
    found: _Sizes = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        varying = {axis: size for axis, size in enumerate(shape) if isinstance(size, torch.SymInt)}
        dims = {axis: _dim(size) for axis, size in varying.items()}
        found[str(node.target)] = dims or None
    return found


def _dim(size: torch.SymInt) -> Any:
    """Return a size as `torch.export` takes it; it finds out what is computed of others."""
    expression = size.node.expr
    bounds = size.node.shape_env.var_to_range.get(expression)
    if bounds is None:
        return torch.export.Dim.AUTO
    low, high = (int(end) if end.is_finite else None for end in (bounds.lower, bounds.upper))
    return torch.export.Dim(str(expression), min=low, max=high)


def _write(
    program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: _Sizes, output: Path
) -> None:
    written = io.BytesIO()
    is_flat = len(sizes) == len(args) + len(kwargs)  # no input is a container of several
    dims = sizes if is_flat and any(sizes.values()) else None
    exported = torch.export.export(program, args, kwargs, dynamic_shapes=dims)
    torch.export.save(exported, written)
    with writing(output):
        output.write_bytes(written.getvalue())
