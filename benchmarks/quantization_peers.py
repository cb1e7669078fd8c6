"""Other quantisers beside ours, where installed: ONNX Runtime, and torchao with Inductor."""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

Inputs = tuple[torch.Tensor, ...]
Way = Callable[..., Any]


def peers(model: nn.Module, batches: list[Inputs], inputs: Inputs) -> dict[str, Way]:
    """Return what each peer that is installed makes of a model, called as the model is.

    A peer that does not take the model is left out, with its reason on the terminal.

    Args:
        model: In eval mode.
        batches: What static scales are found with.
        inputs: What is timed: sizes are fixed.
    """
    makers: dict[str, Callable[[], Way]] = {
        "ONNX Runtime, static": lambda: _onnx_runtime(model, batches, inputs, is_static=True),
        "ONNX Runtime, dynamic": lambda: _onnx_runtime(model, batches, inputs, is_static=False),
        "torchao PT2E, Inductor": lambda: _pt2e(model, batches, inputs),
    }
    found = {}
    for name, make in makers.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name] = make()
                found[name](*inputs)
        except ImportError:
            found.pop(name, None)
        except Exception as error:
            found.pop(name, None)
            print(f"{name} does not take this model: {str(error).splitlines()[0][:120]}")
    return found


def _onnx_runtime(
    model: nn.Module, batches: list[Inputs], inputs: Inputs, *, is_static: bool
) -> Way:
    """Return a session of a quantised copy: QDQ with scales per channel, or dynamic."""
    onnxruntime = importlib.import_module("onnxruntime")
    quantization = importlib.import_module("onnxruntime.quantization")

    with tempfile.TemporaryDirectory() as folder:
        exact, small = Path(folder) / "exact.onnx", Path(folder) / "small.onnx"
        torch.onnx.export(model, inputs, exact, dynamo=True, verbose=False, external_data=False)
        session = onnxruntime.InferenceSession(exact)
        names = [one.name for one in session.get_inputs()]

        class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
            def __init__(self) -> None:
                self.rest: Iterator[Inputs] = iter(batch for batch in batches if _fits(batch))

            def get_next(self) -> dict[str, Any] | None:
                batch = next(self.rest, None)
                return None if batch is None else _as_arrays(names, batch)

        def _fits(batch: Inputs) -> bool:
            return [t.shape for t in batch] == [t.shape for t in inputs]

        if is_static:
            quantization.quantize_static(exact, small, Reader(), per_channel=True)
        else:
            quantization.quantize_dynamic(exact, small)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(small.read_bytes(), options)

    def run(*given: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run(None, _as_arrays(names, given))[0])

    return run


def _as_arrays(names: list[str], tensors: Inputs) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}


def _pt2e(model: nn.Module, batches: list[Inputs], inputs: Inputs) -> Way:
    """Return what Inductor makes, with freezing, of a graph of torchao's x86 quantizer."""
    steps = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    exported: Any = torch.export.export(model, inputs).module(check_guards=False)
    prepared = steps.prepare_pt2e(exported, quantizer)
    for batch in batches:
        if [t.shape for t in batch] == [t.shape for t in inputs]:
            prepared(*batch)
    return torch.compile(steps.convert_pt2e(prepared), options={"freezing": True})
