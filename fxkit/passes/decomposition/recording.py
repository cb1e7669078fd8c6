"""Record which operators a call makes, on fake tensors, and put them in the place of the call.

What torch does in C++ or Python below a call is seen by running it: no numbers are computed,
nothing random is drawn. A recording is made of positions, so that one serves every call of a form.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from fxkit.analysis.operator_mode import OperatorMode
from fxkit.analysis.tensor_types import fake_mode, fake_value
from fxkit.analysis.type_inference.fake_tensors import is_about_data
from fxkit.ir.numbers import number_key
from fxkit.ir.types import TensorType, type_of, type_of_value
from fxkit.passes.decomposition.drawn_masks import drawn_mask, memory_order
from fxkit.passes.decomposition.functional_forms import without_writing
from fxkit.passes.decomposition.unrecordable import Unrecordable
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fake_tensors import reading_errors, tensor_class
from fxkit.torch_adapters.modes import without_dispatch_modes
from fxkit.torch_adapters.operators import schema_of
from fxkit.torch_adapters.tensors import impl_address_of

# Gives the function that computes an operator from others; None for one that is to be recorded.
Expansion = Callable[[Any], "Callable[..., Any] | None"]


class WritesInPlace(Unrecordable):
    """An operator that writes where none may: what it is in can be done without that."""


@dataclass(frozen=True)
class RecordedValue:
    """A tensor in a recording: an operand, when `step` is None, or a result of a step.

    Attributes:
        step: Position of the step, or None.
        index: Which operand; or which of several results, None when the step has one.
    """

    step: int | None
    index: int | None


@dataclass(frozen=True)
class RecordedConstant:
    """A tensor that the call made by itself from numbers."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class RecordedStep:
    """One operator that was called.

    Attributes:
        overload: The operator.
        args: Its operands, tensors as `RecordedValue` or `RecordedConstant`.
        kwargs: Its keyword operands.
        result_type: Type of its result, as `type_of` gives it.
    """

    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result_type: Any


@dataclass
class OperatorRecording:
    """The operators that a call made.

    Attributes:
        steps: The operators, in order.
        result: What the call returned, tensors as `RecordedValue` or `RecordedConstant`.
    """

    steps: list[RecordedStep] = field(default_factory=list)
    result: Any = None


class _Recorder(OperatorMode):
    def __init__(self, operands: Sequence[Any], expansion: Expansion) -> None:
        super().__init__()
        self.recording = OperatorRecording()
        self._expansion = expansion
        self._values: dict[int, RecordedValue] = {}
        self._overwritten: list[tuple[int, RecordedValue]] = []
        self._kept: list[Any] = list(operands)
        for position, tensor in enumerate(operands):
            self._values.setdefault(id(tensor), RecordedValue(None, position))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a device or a layout
            return func(*args, **kwargs)
        try:
            expand = self._expansion(func)
        except WritesInPlace:
            if not self._overwrites(func, args, kwargs):
                raise
            return args[0]
        if expand is not None:
            result = self.attempt(expand, args, kwargs)
            if result is not NotImplemented:
                return result
            raise Unrecordable(f"torch has no decomposition of {func} for these operands")
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if not is_about_data(error):
                raise
            return self._number(func, args, kwargs, error)
        self._take_down(func, args, kwargs, result)
        return result

    def _number(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """Read a number out of tensors that were made of numbers alone, which is always the same.

        Raises:
            The error, when what an operand holds has to do with it.
        """
        asked = self.marked((tuple(args), kwargs))
        with without_dispatch_modes():
            made = _made_of_numbers(self.recording.steps)
            if not made.keys() >= _values_in(asked):
                raise error
            given = _filled(asked, made)
            result = func(*given[0], **given[1])
        if isinstance(result, torch.Tensor):
            raise error
        return result

    def attempt(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function with its operators recorded; where it writes on the way, without that."""
        mark, writes = len(self.recording.steps), len(self._overwritten)
        try:
            with self:
                return function(*args, **kwargs)
        except WritesInPlace:
            del self.recording.steps[mark:]
            while len(self._overwritten) > writes:
                key, value = self._overwritten.pop()
                self._values[key] = value
            with self:
                return torch.func.functionalize(function)(*args, **kwargs)

    def _overwrites(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Compute what an operator writes into a tensor of this recording, which stands for it now.

        To read others in the same memory is `WritesInPlace`. False when it has to be done in
        another way, or can't be.
        """
        target: Any = args[0] if args else None
        known, plain = self._values.get(id(target)), without_writing(func)
        if plain is None or known is None or known.step is None:
            return False
        alike = [id(tensor) for tensor in pytree.tree_leaves(self._kept) if _shares(tensor, target)]
        if any(self._values[key].step is None for key in alike if key in self._values):
            return False
        written = self.attempt(_drawn if plain is _DRAWS else plain, args, kwargs)
        value = self._values.get(id(written))
        if value is None or type_of_value(written) != type_of_value(target):
            return False
        stale = [(key, self._values.pop(key)) for key in alike if key in self._values]
        self._overwritten.extend(stale)
        self._values[id(target)] = value
        return True

    def _take_down(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        marked_args, marked_kwargs = self.marked((tuple(args), kwargs))
        position = len(self.recording.steps)
        func, marked_args, marked_kwargs = self._plain(func, marked_args, marked_kwargs)
        step = RecordedStep(func, marked_args, marked_kwargs, type_of_value(result))
        self.recording.steps.append(step)
        several = isinstance(result, (tuple, list))
        for index, tensor in enumerate(result if several else [result]):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._values:
                self._kept.append(tensor)
                self._values[id(tensor)] = RecordedValue(position, index if several else None)

    def _plain(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Spell tensors that were made of numbers as operators that make them."""
        aten = torch.ops.aten
        if func is aten.lift_fresh.default and isinstance(args[0], RecordedConstant):
            tensor = args[0].tensor
            if tensor.dim():
                return aten.clone.default, args, {}
            options = {"dtype": tensor.dtype, "device": tensor.device}
            with without_dispatch_modes():
                return aten.scalar_tensor.default, (tensor.item(),), options
        if (
            func is aten.fill_.Tensor
            and isinstance(args[1], RecordedValue)
            and args[1].step is not None
        ):
            made = self.recording.steps[args[1].step]
            if made.overload is aten.scalar_tensor.default:
                return aten.fill_.Scalar, (args[0], made.args[0]), {}
        return func, args, kwargs

    def marked(self, value: Any) -> Any:
        """Return a nested value with its tensors named."""
        return pytree.tree_map_only(torch.Tensor, self._mark, value)

    def _mark(self, tensor: torch.Tensor) -> RecordedValue | RecordedConstant:
        known = self._values.get(id(tensor))
        if known is not None:
            return known
        if any(key == id(tensor) for key, _ in self._overwritten):
            raise WritesInPlace("a tensor shows what was written through another")
        if isinstance(tensor, tensor_class()):
            raise Unrecordable("a tensor comes from outside of the call")
        return RecordedConstant(tensor)


def _made_of_numbers(steps: Sequence[RecordedStep]) -> dict[RecordedValue, torch.Tensor]:
    """Return the tensors that depend on no operand, computed; none where others write into one."""
    made: dict[RecordedValue, torch.Tensor] = {}
    for position, step in enumerate(steps):
        operands = (step.args, step.kwargs)
        leaves, values = pytree.tree_leaves(operands), _values_in(operands)
        is_free = any(isinstance(leaf, (torch.SymInt, torch.SymFloat)) for leaf in leaves)
        is_random = torch.Tag.nondeterministic_seeded in step.overload.tags
        if is_free or is_random or not made.keys() >= values:
            if schema_of(step.overload).is_mutable and made.keys() & values:
                return {}
            continue
        args, kwargs = _filled(operands, made)
        result = step.overload(*args, **kwargs)
        several = isinstance(result, (tuple, list))
        for index, tensor in enumerate(result if several else [result]):
            made[RecordedValue(position, index if several else None)] = tensor
    return made


def _values_in(nest: Any) -> set[RecordedValue]:
    return {leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, RecordedValue)}


def _filled(nest: Any, made: dict[RecordedValue, torch.Tensor]) -> Any:
    """Put tensors in the places of their names; constants are copied, for they may be written."""
    nest = pytree.tree_map_only(RecordedConstant, lambda constant: constant.tensor.clone(), nest)
    return pytree.tree_map_only(RecordedValue, made.__getitem__, nest)


def _shares(tensor: Any, other: torch.Tensor) -> bool:
    """Tell whether two tensors lie in the same memory."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return impl_address_of(tensor.untyped_storage()) == impl_address_of(other.untyped_storage())


_DRAWS = torch.ops.aten.bernoulli.p


def _drawn(like: torch.Tensor, p: float = 0.5, **options: Any) -> torch.Tensor:
    """Draw a mask as it is drawn in place."""
    order = memory_order(like.shape, like.stride())
    return drawn_mask(
        lambda overload, *args, **kw: overload(*args, **kw), like, p, order, **options
    )


def _keep(_: Any) -> None:
    """Expand nothing."""


# What torch and its decompositions raise on tensors without numbers, faults of theirs among it.
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def record(
    function: Callable[..., Any], types: Sequence[Any], expansion: Expansion = _keep
) -> OperatorRecording:
    """Run a function of tensors on fake ones, and return the operators that it called.

    Args:
        function: Takes one tensor for each type.
        types: A `TensorType` for each operand.
        expansion: What to do about each operator; all are recorded when left out.

    Raises:
        Unrecordable: When numbers decide, or an operator can't run without them.
    """
    with fake_mode(), torch.no_grad():
        operands = [fake_value(known) for known in types]
        recorder = _Recorder(operands, expansion)
        try:
            result = recorder.attempt(function, operands, {})
            recorder.recording.result = recorder.marked(result)
        except reading_errors() as error:
            raise Unrecordable(
                f"it depends on numbers, in {getattr(error, 'func', 'a call')}"
            ) from error
        except _FAILURES as error:
            text = str(error).splitlines() or [type(error).__name__]
            raise Unrecordable(f"it can't run on types alone: {text[0]}") from error
    return recorder.recording


def form_of_call(target: Any, node_args: Any) -> Hashable | None:
    """Return what calls with equal recordings have in common, or None when it can't be told.

    Args:
        target: What is called.
        node_args: Its operands, nested, with nodes.
    """
    leaves, spec = pytree.tree_flatten(node_args)
    nodes: dict[fx.Node, int] = {}
    parts: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, fx.Node):
            position = nodes.setdefault(leaf, len(nodes))
            parts.append((position, _hashable_type(type_of(leaf))))
        else:
            parts.append((type(leaf), number_key(leaf)))
    key = (target, str(spec), tuple(parts))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _hashable_type(known: Any) -> Hashable:
    if isinstance(known, TensorType):
        return replace(known, requires_grad=False)
    return (type(known), str(known))


def short_name(overload: Any) -> str:
    """Return a name for a node that calls an overload: `add` for `aten.add.Tensor`."""
    return str(schema_of(overload).name).partition("::")[2]
