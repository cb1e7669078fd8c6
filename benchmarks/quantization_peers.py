"""Other quantisers beside ours, where installed: ONNX Runtime, and torchao with Inductor."""

from __future__ import annotations

import copy
import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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
    alike = [_as_large(batch, inputs) for batch in batches]
    makers: dict[str, Callable[[], Way]] = {
        "ONNX Runtime, static": lambda: _onnx_runtime(model, alike, inputs, is_static=True),
        "ONNX Runtime, dynamic": lambda: _onnx_runtime(model, [], inputs, is_static=False),
        "torchao PT2E, static, Inductor": lambda: _pt2e(model, alike, inputs, is_dynamic=False),
    }
    if any(isinstance(one, nn.Linear) for one in model.modules()):
        makers |= {
            "torchao PT2E, dynamic, Inductor": lambda: _pt2e(model, [], inputs, is_dynamic=True),
            "torchao int8 weights only, Inductor": lambda: _weights_only(model),
        }
    found = {}
    for name, make in makers.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                way = make()
                found[name] = _on_copies(way) if _writes(way, inputs) else way
        except ImportError:
            found.pop(name, None)
        except Exception as error:
            found.pop(name, None)
            print(f"{name} does not take this model: {str(error).splitlines()[0][:120]}")
    return found


def _writes(way: Way, inputs: Inputs) -> bool:
    """Tell whether a way changes its inputs, as Inductor does; they are left as before."""
    before = [one.clone() for one in inputs]
    way(*inputs)
    is_changed = not all(map(torch.equal, before, inputs))
    for kept, one in zip(before, inputs, strict=True):
        one.copy_(kept)
    return is_changed


def _on_copies(way: Way) -> Way:
    return lambda *given: way(*(one.clone() for one in given))


def _onnx_runtime(
    model: nn.Module, batches: list[Inputs], inputs: Inputs, *, is_static: bool
) -> Way:
    """Return a session of a quantised copy: QDQ with scales per channel, or dynamic."""
    onnxruntime = importlib.import_module("onnxruntime")
    quantization = importlib.import_module("onnxruntime.quantization")
    shapes = importlib.import_module("onnxruntime.quantization.shape_inference")

    with tempfile.TemporaryDirectory() as folder:
        given, exact, small = (
            Path(folder) / f"{name}.onnx" for name in ("given", "exact", "small")
        )
        torch.onnx.export(model, inputs, given, dynamo=True, verbose=False, external_data=False)
        shapes.quant_pre_process(given, exact, skip_symbolic_shape=True)  # folds batch norms
        session = onnxruntime.InferenceSession(exact)
        names = [one.name for one in session.get_inputs()]

        class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
            def __init__(self) -> None:
                self.rest: Iterator[Inputs] = iter(batches)

            def get_next(self) -> dict[str, Any] | None:
                batch = next(self.rest, None)
                return None if batch is None else _as_arrays(names, batch)

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


def _as_large(batch: Inputs, inputs: Inputs) -> Inputs:
    """Return a batch in the sizes of what is timed: rows are repeated, and padded with zeros."""
    found = []
    for tensor, wanted in zip(batch, inputs, strict=True):
        ends = [(0, max(0, w - n)) for n, w in zip(tensor.shape[1:], wanted.shape[1:], strict=True)]
        padded = F.pad(tensor, [side for end in reversed(ends) for side in end])
        times = -(-wanted.shape[0] // max(1, padded.shape[0]))
        repeated = padded.repeat(times, *[1] * (padded.ndim - 1))
        found.append(repeated[tuple(slice(size) for size in wanted.shape)].contiguous())
    return tuple(found)


def _pt2e(model: nn.Module, batches: list[Inputs], inputs: Inputs, *, is_dynamic: bool) -> Way:
    """Return what Inductor makes, with freezing, of a graph of torchao's x86 quantizer."""
    steps = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86 = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer()
    config = x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic)
    quantizer.set_global(config)
    exported: Any = torch.export.export(model, inputs).module(check_guards=False)
    prepared = steps.prepare_pt2e(exported, quantizer)
    for batch in batches or [inputs]:
        prepared(*batch)
    return _frozen(steps.convert_pt2e(prepared))


def _weights_only(model: nn.Module) -> Way:
    """Return what Inductor makes, with freezing, of linear layers with int8 weights."""
    torchao = importlib.import_module("torchao.quantization")
    small = copy.deepcopy(model)
    torchao.quantize_(small, torchao.Int8WeightOnlyConfig())
    return _frozen(small)


def _frozen(model: nn.Module) -> Way:
    """Return what Inductor compiles with freezing, for all that this process compiles from now on.

    With torch 2.13 and torchao 0.18 the option of the same name fails for PT2E's graphs.
    """
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.freezing = True
    return torch.compile(model)
