"""Put observers into a program, which go on computing what it computed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from fxkit.analysis.tensor_types import infer_missing_types
from fxkit.errors import UnsupportedError
from fxkit.ir.op import is_check
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.constant_folding import ConstantFolding
from fxkit.passes.manager.manager import PassManager
from fxkit.passes.probes import Probe, ProbeSite, insert_probe
from fxkit.quantization.batches import told_where_it_does_not_fit
from fxkit.quantization.config import QuantizationConfig
from fxkit.quantization.fold_weights import FoldWeights
from fxkit.quantization.observed_places import ObservedPlaces, new_observer, observed
from fxkit.quantization.observers import RangeObserver
from fxkit.quantization.open_attention import OpenAttention
from fxkit.quantization.open_layers import OpenLayers
from fxkit.quantization.placement import placements
from fxkit.quantization.preparation_warnings import warn_of_what_stays
from fxkit.quantization.quantization_choices import QuantizationChoices
from fxkit.quantization.sharing import origins
from fxkit.quantization.specs import QuantizationSpec, TensorSpec
from fxkit.quantization.state_values import state_groups, state_values
from fxkit.quantization.weight_products import CallLinear
from fxkit.torch_adapters.tensors import version_counter_of
from fxkit.tracing.capture_modes import capture
from fxkit.tracing.captured import Captured
from fxkit.tracing.recaptures import capture_error

Program = Captured | fx.GraphModule


def _is_settled(node: fx.Node) -> bool:
    """Tell whether a node checks a value that is the same in each call, whatever tensors hold."""
    if not is_check(node):
        return False
    seen, waiting = {node}, [node]
    while waiting:
        sources = [one for one in waiting.pop().all_input_nodes if one not in seen]
        seen.update(sources)
        waiting += sources
    return all(one.op.startswith("call") for one in seen)


# What lets operators read their weights from the module, and `torch.export` take the graph, which
# refuses checks of values of tensors.
_SHOW_WEIGHTS = (
    OpenAttention(),
    CallLinear(),
    FoldWeights(),
    ConstantFolding(where=_is_settled),
)


class ObserverProbe(Probe):
    """Shows the value of a node to an observer.

    Args:
        place: The node.
        observer: What looks at it.
    """

    def __init__(self, place: ProbeSite, observer: RangeObserver) -> None:
        super().__init__(place)
        self.observer = observer

    def look(self, *values: Any) -> None:
        """Let the observer look."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self.observer(value)


@dataclass(frozen=True)
class InsertObservers(Pass):
    """Observe each activation that is going to be quantised; results stay bit for bit.

    Rewrites:
        %y = aten.linear(%x, %w)  →  opaque.ObserverProbe(%x); %y = aten.linear(%x, %w)

    Attributes:
        config: What is quantised, and how.
        places: The observers, and where each looks; new ones are added.
    """

    config: QuantizationConfig = field(default_factory=lambda: QuantizationConfig(None))
    places: ObservedPlaces = field(default_factory=ObservedPlaces)

    is_idempotent: ClassVar[bool] = False
    adds_effects: ClassVar[bool] = True

    def for_copy(self, memo: dict[int, Any]) -> Pass:
        """Return the pass with observers of its own."""
        return replace(self, places=copy.deepcopy(self.places, memo))

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Insert a probe after each node whose range is needed. Cost: linear."""
        self.places.begin(edit.gm)
        nodes = {node.name: node for node in edit.graph.nodes}
        decided = placements(edit.gm, self.config)
        self.places.note_operands(edit.gm, decided)
        wanted = observed(decided)
        groups = origins(edit.gm) if self.config.shares_scales else {}
        states = state_values(edit.gm, self.config.state)
        groups |= state_groups(states)
        for state in states:
            wanted |= dict.fromkeys(state.quantized, self.config.state_spec)
        keys = {name: self.places.key_of(nodes[name]) for name in wanted}
        shared: dict[tuple[str, TensorSpec], RangeObserver] = {}
        for name, spec in wanted.items():
            if keys[name] in self.places.observers:
                shared.setdefault((groups.get(name, name), spec), self.places.observers[keys[name]])
        for name, spec in wanted.items():
            if keys[name] not in self.places.observers:
                group = groups.get(name, name), spec
                observer = shared.setdefault(group, new_observer(spec))
                self.places.add(keys[name], spec, observer)
        for name, key in keys.items():
            node, observer = nodes[name], self.places.observers[key]
            insert_probe(edit, node, ObserverProbe(ProbeSite.of(node), observer))


class PreparedProgram:
    """A program whose activations are observed in each call. Made by `prepare`.

    Attributes:
        program: The captured program or graph that runs.
        config: What is going to be quantised, and how.
        places: The observers, and where each looks.
        choices: What algorithms chose: integers of weights and corrections of biases.
    """

    def __init__(
        self,
        remake: Callable[[], Program],
        config: QuantizationConfig,
        places: ObservedPlaces | None = None,
    ) -> None:
        self.remake = remake
        self.config = config
        self.places = ObservedPlaces() if places is None else places
        self.choices = QuantizationChoices()
        with torch.no_grad():  # as calls are observed
            program = remake()
            state_values(graph_module_of(program), config.state)  # for an error that names no pass
            self.program = apply(program, InsertObservers(config, self.places))

    def __repr__(self) -> str:
        """Say what runs, and how many observers there are."""
        seen = sum(bool(observer.count) for observer in self.observers.values())
        of = f"PreparedProgram of {type(self.program).__name__}"
        return f"<{of}, {len(self.observers)} observers, {seen} have seen values>"

    @property
    def observers(self) -> dict[str, RangeObserver]:
        """The observers by the names of the nodes that they look at; see `ObservedPlaces`."""
        return self.places.observers

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph that ran last, with its observers."""
        return graph_module_of(self.program)

    @property
    def graph_modules(self) -> tuple[fx.GraphModule, ...]:
        """All graphs that have run, with their observers."""
        return graph_modules_of(self.program)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program without gradients, and let the observers look."""
        with torch.no_grad():
            return self.program(*args, **kwargs)

    def merge(self, other: PreparedProgram) -> None:
        """Add what another one of the same program has seen, so that data can be shared out.

        Raises:
            UnsupportedError: When it observes other nodes, or with other observers.
        """
        if self.observers.keys() != other.observers.keys():
            differing = sorted(self.observers.keys() ^ other.observers.keys())
            raise UnsupportedError(
                f"expected a program with the same observers, got others at {differing[:3]}",
                hint="prepare both from one model, with one config",
            )
        pairs = {id(one): (one, other.observers[name]) for name, one in self.observers.items()}
        for mine, theirs in pairs.values():
            mine.merge(theirs)


def prepare(
    model: Any,
    args: tuple[Any, ...] = (),
    config: QuantizationConfig | QuantizationSpec | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> PreparedProgram:
    """Return a program that computes what `model` does and observes what will be quantised.

    Args:
        model: A module, function or captured program; or a `torch.fx.GraphModule`, of which a copy
            is changed that shares its parameters.
        args: Example inputs to capture with.
        config: What is quantised, and how; a spec alone holds for all operators.
        kwargs: Example keyword inputs.

    Raises:
        CaptureError: When the model is not one graph.
        UnsupportedError: When `config` is none, or the model is in training mode or was captured in
            another mode than "whole".
    """
    config = as_config(config)
    check_args(args)
    prepared = PreparedProgram(FloatGraph(model, args, kwargs), config)
    warn_of_what_stays(prepared.graph_modules, config)
    return prepared


@contextlib.contextmanager
def buffers_kept(model: Any) -> Iterator[None]:
    """Put the content of a model's buffers back that is written meanwhile."""
    fn = model.fn if isinstance(model, Captured) else model
    fn = getattr(fn, "__self__", fn)
    buffers = list(fn.buffers()) if isinstance(fn, nn.Module) else []
    tracked = [one for one in buffers if not (one.is_inference() or is_lazy(one))]
    before = [(buffer, version_counter_of(buffer), buffer.clone()) for buffer in tracked]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, content in before:
                if version_counter_of(buffer) != version:
                    buffer.copy_(content)


def check_args(args: object) -> None:
    """Check that example inputs are positional ones.

    Raises:
        UnsupportedError: When they are not a tuple or list.
    """
    if isinstance(args, Mapping):
        raise UnsupportedError(
            "expected args to be a tuple of positional inputs, got a dict",
            hint="give keyword inputs by name: kwargs=batch",
        )
    if not isinstance(args, (tuple, list)):
        raise UnsupportedError(
            f"expected args to be a tuple of positional inputs, got {type(args).__name__}",
            hint="one input is (x,)",
        )


@dataclass(frozen=True)
class FloatGraph:
    """Makes graphs of a model, in floating point, of which each can be changed.

    Attributes:
        model: What `prepare` takes.
        args: Example inputs.
        kwargs: Example keyword inputs.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None

    def __call__(self) -> Program:
        """Return a new graph of the model as it is now; raises what `graph_of` raises.

        The model is run for that; its buffers stay as they are.
        """
        with buffers_kept(self.model):
            return graph_of(self.model, self.args, self.kwargs)


def as_config(config: QuantizationConfig | QuantizationSpec | None) -> QuantizationConfig:
    """Return a config; a spec alone holds for all operators.

    Raises:
        UnsupportedError: When it is neither.
    """
    if isinstance(config, QuantizationSpec):
        config = QuantizationConfig(config)
    if not isinstance(config, QuantizationConfig):
        raise UnsupportedError(
            f"expected a QuantizationConfig or QuantizationSpec, got {_told(config)}",
            hint="fxkit.quantization.int8_static() is a spec to begin with",
        )
    return config


def _told(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str | type) else _kind(value)


def as_prepared(prepared: Any) -> PreparedProgram:
    """Return a prepared program.

    Raises:
        UnsupportedError: When it is something else.
    """
    if not isinstance(prepared, PreparedProgram):
        raise UnsupportedError(
            f"expected what prepare returned, got {_kind(prepared)}",
            hint="prepared = fxkit.quantization.prepare(model, args, config)",
        )
    return prepared


def graph_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Program:
    """Return a new graph of a model, which can be changed without changing the model.

    What was applied to a captured program is applied to the new one.

    Raises:
        CaptureError: When the model is not one graph.
        UnsupportedError: When it is in training mode, or a program of another mode of capture.
    """
    if isinstance(model, fx.GraphModule):
        copied = fx.GraphModule(model, copy.deepcopy(model.graph))
        return apply(copied, OpenLayers(), *_SHOW_WEIGHTS)
    if type(model) is not Captured and _has_graph(model):
        raise UnsupportedError(
            f"expected a model, a graph, or a program captured in mode 'whole', got {_kind(model)}",
            hint="give what it was captured from, or its graph with parameters: program.module()",
        )
    fn = model.fn if isinstance(model, Captured) else model
    if isinstance(fn, nn.Module) and fn.training:
        raise UnsupportedError(
            "expected a model in eval mode, got one in training mode",
            hint="call model.eval() first: batch norms and dropout are calibrated as they run",
        )
    check_args(args)
    keywords = dict(kwargs or {})
    with told_where_it_does_not_fit(args, keywords):
        if not isinstance(model, Captured):
            return apply(capture(fn, args, keywords), *_SHOW_WEIGHTS)
        program = copy.copy(model)  # with its options, and graphs of its own
        if model.changes:
            program(*args, **keywords)
        elif (failure := program.capture_now(args, keywords).failure) is not None:
            raise capture_error(failure)
        return apply(program, *_SHOW_WEIGHTS)


def _has_graph(model: Any) -> bool:
    """Tell whether something holds a graph, which it may not have captured yet."""
    return hasattr(type(model), "graph_module") or "graph_module" in getattr(model, "__dict__", {})


def _kind(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def graph_module_of(program: Program) -> fx.GraphModule:
    """Return the graph of a program: itself, or the one that ran last.

    Raises:
        UnsupportedError: When it is something else, such as the model.
    """
    if not isinstance(program, fx.GraphModule) and not _has_graph(program):
        raise UnsupportedError(
            f"expected a program with a graph, got {_kind(program)}",
            hint="give what prepare or convert returned, or fxkit.capture(model, args)",
        )
    return program if isinstance(program, fx.GraphModule) else program.graph_module


def graph_modules_of(program: Program) -> tuple[fx.GraphModule, ...]:
    """Return all graphs of a program that have run."""
    return (program,) if isinstance(program, fx.GraphModule) else program.graphs[::-1]


def apply(program: Program, *passes: Pass) -> Program:
    """Run passes over a program; where it has several graphs, over each. New nodes get types."""
    PassManager(list(passes)).run(program)
    for gm in graph_modules_of(program):
        infer_missing_types(gm)
    return program


def model_of(program: Program) -> nn.Module | None:
    """Return the module that a program was captured from, or whose method; None of others."""
    fn = program.fn if isinstance(program, Captured) else None
    fn = getattr(fn, "__self__", fn)
    return fn if isinstance(fn, nn.Module) else None
