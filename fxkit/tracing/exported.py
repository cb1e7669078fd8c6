"""Mode `export`: programs that torch has exported, from memory or from files."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from fxkit.errors import CaptureError, UnsupportedError
from fxkit.ir.program_changes import GraphProgram
from fxkit.torch_adapters.aot_autograd import torchscript_converter
from fxkit.torch_adapters.quantized_operators import quantized_operators
from fxkit.tracing.recorder.frames import source_text
from fxkit.tracing.values.refusals import said

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_SAVED = "write one with torch.export.save(torch.export.export(model, args), 'model.pt2')"
_REMEDIES = (
    (
        ("data-dependent", "DataDependent", "GuardOnDataDependent"),
        "a branch or a shape that depends on the numbers in a tensor",
        "use fxkit.capture(fn, args), which guards such values",
    ),
    (
        ("mutat", "side effect", "setattr"),
        "a program that changes Python state",
        "use fxkit.capture(fn, args), which writes it again at each call",
    ),
    (
        ("Unsupported", "Dynamo", "graph break"),
        "Python that torch.export can't follow",
        "use fxkit.capture(fn, args), which runs the program and records it",
    ),
)


class Exported(GraphProgram):
    """A program that torch has exported; made by `capture(mode="export")`.

    It holds for the inputs that it was exported for: torch checks them at each call, and raises.

    Attributes:
        program: The `torch.export.ExportedProgram`.
        args: The example inputs that came with it.
        kwargs: Those given by keyword.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        module = program.module()
        assert isinstance(module, fx.GraphModule)
        self._graph_module = module
        args, kwargs = program.example_inputs or ((), {})
        self.args, self.kwargs = tuple(args), dict(kwargs)

    @property
    def graph_module(self) -> fx.GraphModule:
        """Its graph with the parameters inside, called like the program."""
        return self._graph_module

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the exported graph."""
        return self.graph_module(*args, **kwargs)

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes of `graph_module`, in order."""
        return list(self.graph_module.graph.nodes)

    @property
    def guards(self) -> tuple[str, ...]:
        """What it takes for granted of sizes that are not fixed, as text."""
        ranges = self.program.range_constraints.items()
        return tuple(f"{span.lower} <= {name} <= {span.upper}" for name, span in ranges)


def capture_exported(
    source: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None
) -> Exported:
    """Take over, or make, an exported program.

    Args:
        source: A module, an `ExportedProgram`, a TorchScript module or function, or the path of a
            file: `.pt2` of `torch.export.save`, or an archive of `torch.jit.save`.
        args: Positional arguments to export a module or to convert TorchScript with.
        kwargs: Keyword arguments.
        dynamic_shapes: As `torch.export.export` takes it.

    Raises:
        CaptureError: When torch can't export or convert it, with the line and what to do.
        UnsupportedError: When it is nothing of these.
    """
    from torch.export import ExportedProgram

    if isinstance(source, (str, Path)):
        source = _loaded(Path(source))
    if isinstance(source, ExportedProgram):
        return Exported(source)
    if isinstance(source, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return Exported(_converted(source, args, kwargs))
    if isinstance(source, torch.nn.Module):
        return Exported(_exported(source, args, kwargs, dynamic_shapes))
    raise UnsupportedError(
        f"expected a module, an exported program or the path of one, got {type(source).__name__}",
        hint="torch.export takes modules only: use fxkit.capture(fn, args) for a function",
    )


def load_program(path: Path) -> ExportedProgram:
    """Load a `.pt2` file with `torch.export.load`.

    Torch says of that format: load only files that you trust.

    Args:
        path: What `torch.export.save` wrote.

    Returns:
        The program.

    Raises:
        UnsupportedError: When there is no such file, or it holds no exported program.
    """
    import torch.export

    got = _other_kind(path)
    if got is not None:
        raise UnsupportedError(f"expected an exported program in {path}, got {got}", hint=_SAVED)
    with contextlib.suppress(UnsupportedError):  # of a torch without them
        quantized_operators()
    try:
        with warnings.catch_warnings():
            # torch 2.11 makes weights of bytes that nobody else has, and warns of that.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return torch.export.load(path)
    except (RuntimeError, ValueError, OSError, KeyError, AssertionError) as error:
        reason = str(error).strip().splitlines()
        raise UnsupportedError(
            f"expected an exported program in {path}, got a file that torch.export can't load: "
            f"{reason[0] if reason else type(error).__name__}",
            hint=_SAVED,
        ) from error


def _other_kind(path: Path) -> str | None:
    """Return what is there instead of an exported program; None for what looks like one."""
    if path.is_dir():
        return "a folder"
    if not path.is_file():
        return "no such file"
    if not zipfile.is_zipfile(path):
        return "a file of another kind"
    with zipfile.ZipFile(path) as archive:
        names = {name.rpartition("/")[2] for name in archive.namelist()}
    if names & {"archive_format", "serialized_exported_program.json"}:
        return None
    if _is_torchscript(path):
        return "an archive of TorchScript"
    return "what torch.save wrote" if "data.pkl" in names else "an archive of something else"


def _loaded(path: Path) -> Any:
    if _is_torchscript(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's own words on torch.jit
            return torch.jit.load(str(path), map_location="cpu")
    return load_program(path)


def _is_torchscript(path: Path) -> bool:
    """Tell whether a file is an archive of TorchScript: it holds code and constants."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
    return any(name.startswith("code/") for name in names) and "constants.pkl" in names


def _converted(source: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    converter = torchscript_converter()
    if converter is None:
        raise UnsupportedError(
            "expected a torch that converts TorchScript, got one without the converter",
            hint="export the model itself with torch.export",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.jit, and of the converter's own graph
            return converter(source, args, kwargs).convert()
    except Exception as error:  # the converter raises whatever it meets
        raise CaptureError(
            f"expected TorchScript that torch can convert, got {said(error)}",
            hint="export the model that it came from with torch.export",
        ) from error


def _exported(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # torch.export raises whatever it meets, its own faults included
        text = f"{type(error).__name__}: {error}"
        what, hint = next(
            ((what, hint) for words, what, hint in _REMEDIES if any(w in text for w in words)),
            (said(error), "use fxkit.capture(fn, args), which runs the program and records it"),
        )
        raise CaptureError(
            f"expected a program that torch.export can follow, got {what}",
            source=_line(error),
            hint=hint,
        ) from error


def _line(error: Exception) -> str | None:
    """Return the user's line: what torch says it was, or the last one before torch's own."""
    stack = list(getattr(error, "real_stack", None) or ())
    stack = stack or traceback.extract_tb(error.__traceback__)
    own = [
        f for f in stack if f.filename != __file__ and f"{os.sep}torch{os.sep}" not in f.filename
    ]
    if own:
        return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"
    return source_text(str(error))
