"""A model that is trained with fake quantisation, and converts to what it has learnt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxkit.errors import UnsupportedError
from fxkit.quantization.affine import QuantizationParameters, parameters_of
from fxkit.quantization.batches import Batch, call_with
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.observed_places import ObservedPlaces
from fxkit.quantization.observers import RangeObserver
from fxkit.quantization.open_attention import OpenAttention
from fxkit.quantization.preparation import (
    PreparedProgram,
    Program,
    apply,
    as_config,
    check_args,
)
from fxkit.quantization.qat.fake_quantizer import FakeQuantizer, FakeQuantizerOptions, range_of
from fxkit.quantization.qat.insertion import (
    OF_ACTIVATION,
    OF_WEIGHT,
    FoldQuantizedNorms,
    InsertFakeQuantizers,
)
from fxkit.quantization.specs import QuantizationSpec
from fxkit.tracing.capture_modes import capture

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class KnownRange(RangeObserver):
    """Stands where calibration had an observer, for a range that training has found."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        super().__init__()
        self.low, self.high = low, high
        self.count = 1

    def watch(self, values: Tensor, finite: Tensor) -> None:
        """Keep the range as it is."""

    def found(self) -> tuple[Tensor, Tensor]:
        """Return the range."""
        return self.low.reshape(1), self.high.reshape(1)


class QatProgram(nn.Module):
    """A copy of a model that computes with fake quantisation. Made by `prepare_qat`.

    Its parameters are those to train. `fxkit.compile(qat.program)` trains compiled.

    Attributes:
        model: The copy, whose parameters are trained.
        quantizers: The fake quantisers by the names of what they round.
        program: The captured program, with a graph for training and one for evaluation.
        config: What is going to be quantised, and how.
        frozen_scales: int64[], 1 when scales stay as they are, else 0; a number can be averaged.
        frozen_norms: int64[], 1 when batch norms stay as they are, else 0.
    """

    frozen_scales: Tensor
    frozen_norms: Tensor

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
        config: QuantizationConfig,
        batches: Iterable[Batch],
        options: FakeQuantizerOptions,
    ) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self._inputs = inputs
        self.register_buffer("frozen_scales", torch.tensor(0))
        self.register_buffer("frozen_norms", torch.tensor(0))
        self.register_load_state_dict_post_hook(_stay_frozen)
        self.quantizers = nn.ModuleDict()
        self._places = ObservedPlaces()
        ranges = self._first_ranges(batches)
        kept = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.program = capture(self.model, inputs[0], dict(inputs[1]))
        insert = InsertFakeQuantizers(config, self.quantizers, ranges, options, self._places)
        apply(self.program, OpenAttention(), insert)
        for batch in batches:  # so that optimizers get the steps of each branch
            call_with(self.program, batch)
        for name, buffer in self.model.named_buffers():  # to capture runs a step of training
            buffer.copy_(kept[name])
        for quantizer in self._made.values():
            quantizer.restart()

    @property
    def _made(self) -> dict[str, FakeQuantizer]:
        return {n: one for n, one in self.quantizers.items() if isinstance(one, FakeQuantizer)}

    def _first_ranges(self, batches: Iterable[Batch]) -> dict[str, QuantizationParameters]:
        prepared = PreparedProgram(self._in_float(), self.config, self._places.named_alike())
        with torch.no_grad():
            for batch in batches:
                call_with(prepared, batch)
        specs = prepared.places.specs
        seen = {name: one.value_range() for name, one in prepared.observers.items() if one.count}
        return {n: parameters_of(one.low, one.high, specs[n]) for n, one in seen.items()}

    def _in_float(self) -> Callable[[], Program]:
        """Return what makes a program of the model as it is now, batch norms folded."""
        return _FoldedGraph(copy.deepcopy(self.model).eval(), self._inputs, self.config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with fake quantisation; in training mode ranges move."""
        return self.program(*args, **kwargs)

    def train(self, mode: bool = True) -> QatProgram:
        """Set training or evaluation mode, also of the fake quantisers."""
        super().train(mode)
        if self.frozen_norms:
            self._set_norms(False)
        return self

    def freeze(self, *, norms: bool = True) -> None:
        """Keep scales of activations, learnt steps and batch norms' statistics from now on.

        Parameters go on being trained: with what the converted program will compute. A state dict
        holds what is frozen.

        Args:
            norms: Whether batch norms are frozen, too.
        """
        self.frozen_scales.fill_(1)
        self.frozen_norms.logical_or_(torch.tensor(norms))
        _stay_frozen(self)

    def _set_norms(self, mode: bool) -> None:
        for module in self.model.modules():
            if isinstance(module, _NORMS):
                module.train(mode)

    def prepared(self) -> PreparedProgram:
        """Return a calibrated program of what was trained, for `convert`, `report` and `compare`.

        Training further does not change it.
        """
        places = self._places.named_alike()
        prepared = PreparedProgram(self._in_float(), self.config, places)
        for key, quantizer in self._made.items():
            if key.startswith(OF_WEIGHT):
                if quantizer.learns:
                    path = key.removeprefix(OF_WEIGHT).replace("/", ".")
                    prepared.choices.scales[path] = quantizer.by_channel()
            elif quantizer.learns or (quantizer.moves and not quantizer.is_waiting):
                low, high = range_of(quantizer.found(), quantizer.spec)
                known = KnownRange(low.reshape(()), high.reshape(()))
                places.add(key.removeprefix(OF_ACTIVATION), quantizer.spec, known)
        return prepared


@dataclass(frozen=True)
class _FoldedGraph:
    """Makes graphs of a model, in floating point, with batch norms folded."""

    model: nn.Module
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]]
    config: QuantizationConfig

    def __call__(self) -> Program:
        program = capture(self.model, self.inputs[0], dict(self.inputs[1]))
        return apply(program, OpenAttention(), FoldQuantizedNorms(self.config))


def _stay_frozen(program: QatProgram, keys: object = None) -> None:
    """Freeze what the buffers of a program say, also those of a state dict that it has loaded."""
    for quantizer in program._made.values():
        if program.frozen_scales:
            quantizer.freeze()
    if program.frozen_norms:
        program._set_norms(False)


def prepare_qat(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    config: QuantizationConfig | QuantizationSpec | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    batches: Iterable[Batch] = (),
    learn_steps: bool = False,
    momentum: float = 0.01,
) -> QatProgram:
    """Return a copy of a model to be trained with fake quantisation, in training mode.

    `convert` makes of it the reference graph that it makes of a calibrated program.

    Args:
        model: A module, best one that is trained already; it stays as it is.
        args: Example inputs to capture with.
        config: What is quantised, and how; a spec alone holds for all operators.
        kwargs: Example keyword inputs.
        batches: Inputs that ranges of activations begin with; the example inputs where left out. In
            branches that none of them takes ranges begin with the first batch in training.
        learn_steps: Whether scales are parameters (LSQ), instead of following the values' range.
        momentum: How far a range moves to that of each batch.

    Raises:
        CaptureError: When the model is not one graph.
        UnsupportedError: When `model` is no module, `config` is none or has a state, or it stores
            weights in floating point.
    """
    config = as_config(config)
    check_args(args)
    floats = [spec.weights for spec in config.specs if spec.weights.is_float]
    if floats:
        raise UnsupportedError(
            f"expected weights to train as integers, got {floats[0]}",
            hint="train in floating point, and prepare the trained model with this spec",
        )
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"expected a module to train, got {type(model).__name__}",
            hint="give the module itself; of a captured program, its graph: program.graph_module",
        )
    if config.state:
        raise UnsupportedError(
            f"expected a config without state to train with, got state={dict(config.state)}",
            hint="train without it, then prepare and convert the trained model with it",
        )
    inputs = (tuple(args), dict(kwargs or {}))
    seen = list(batches) or [inputs[0] or inputs[1]]
    own = copy.deepcopy(model).train()
    options = FakeQuantizerOptions(learn_steps, momentum)
    return QatProgram(own, inputs, config, seen, options)
