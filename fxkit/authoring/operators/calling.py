"""Calls of an operator past torch's dispatcher, where that has nothing to add to them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.eager_kernels import EagerKernels
from fxkit.ir.modes import has_modes, is_followed
from fxkit.lower.runtime import autograd_node, binding
from fxkit.torch_adapters.custom_functions import direct_apply
from fxkit.torch_adapters.operator_derivatives import has_all_derivatives
from fxkit.torch_adapters.transforms import has_transforms, is_forward_mode

# Programs are kept for so many types of operands.
_MAX_PROGRAMS = 256

# Operators with more results are differentiated in Python.
_MAX_RESULTS = 8

_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Callee(Protocol):
    """What is called: an operator that is registered with torch."""

    definition: Definition
    kernels: EagerKernels
    calls: Calls
    overload: Any

    def composition(self, *args: Any, **kwargs: Any) -> Any: ...
    def operands(self, arguments: Sequence[Any]) -> list[Any]: ...
    def differentiable(self, arguments: Sequence[Any]) -> Any: ...
    def undifferentiated(self, *arguments: Any) -> Any: ...
    def save(self, ctx: Any, inputs: Sequence[Any], output: Any = None) -> None: ...
    def gradient(self, by: str) -> Callee: ...
    def gradients(
        self,
        saved: Sequence[torch.Tensor],
        numbers: Mapping[str, Any],
        needed: Sequence[bool],
        grads: Sequence[torch.Tensor],
    ) -> tuple[Any, ...]: ...


class Calls:
    """Calls one operator, and remembers programs for the types and numbers that it saw.

    Args:
        registration: The operator.
        otherwise: Takes each call for which no program is remembered; it ends in `run`.

    Attributes:
        fast: What to call: `otherwise` itself, or as soon as there is the binding, its own type of
            callable, which looks among the programs without Python.
    """

    def __init__(self, registration: Callee, otherwise: Callable[..., Any]) -> None:
        self._registration = registration
        self._otherwise = otherwise
        self._programs: dict[Hashable, Any] = {}
        self._native: Any = None
        self.fast: Callable[..., Any] = otherwise

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], arguments: list[Any]) -> Any:
        """Call the operator, and remember how.

        Args:
            args: Arguments as they were given.
            kwargs: Those that were given by name.
            arguments: All of them in order, with defaults, and tensors for numbers.
        """
        known = self._registration
        operands = known.operands(arguments)
        if not _are_plain(operands):
            is_composed = not has_all_derivatives() and _derives(operands)
            return (known.composition if is_composed else known.overload)(*arguments)
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            found = known.differentiable(arguments)
            if len(known.definition.results) > _MAX_RESULTS:
                return found
        else:
            found = known.overload(*arguments)
        if any(x.is_floating_point() for x in operands):  # else the default dtype has a say
            self._remember(args, kwargs, arguments)
        return found

    def _remember(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], arguments: list[Any]
    ) -> None:
        definition = self._registration.definition
        named = dict(zip((p.name for p in definition.parameters), arguments, strict=True))
        operands = [named[name] for name in definition.tensors]
        numbers = {name: named[name] for name in definition.numbers}
        key = (
            tuple((x.dtype, x.shape, x.stride()) for x in operands),
            tuple((type(value), value) for value in numbers.values()),
        )
        if key not in self._programs:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.pop(next(iter(self._programs)))
            self._programs[key] = self._registration.kernels.program(operands, numbers)
        program, native = self._programs[key], binding.loaded()
        if program is None or native is None:
            return
        if self._native is None:
            self._native = self._made(native)
            self.fast = self._native
        given = self._given(args, kwargs)
        passed: list[Any] = []
        for parameter, value in zip(definition.parameters, given, strict=True):
            is_number = not isinstance(value, torch.Tensor)
            stands = named[parameter.name] if is_number else native.MISS
            passed.append(stands if parameter.is_tensor else native.FREE)
        marks = [native.MISS if isinstance(v, torch.Tensor) else v for v in given]
        self._native.add(program, tuple(marks), tuple(passed), self._rule(native, named))

    def _rule(self, native: Any, named: Mapping[str, Any]) -> Any:
        """Return how gradients are computed of calls with certain numbers; None in Python alone."""
        known, definition = self._registration, self._registration.definition
        if len(definition.results) > _MAX_RESULTS:
            return None
        autograd_node.attach_if_built()

        def find(place: int) -> Calls:
            return known.gradient(definition.tensors[place]).calls

        passed = [native.FREE if p.is_tensor else named[p.name] for p in definition.parameters]
        name, results = f"{definition.name}Backward", len(definition.results)
        return native.GradientRule(name, tuple(passed), find, results)

    def _made(self, native: Any) -> Any:
        known = self._registration
        parameters = known.definition.parameters
        made = native.Calls(
            tuple(p.name for p in parameters),
            sum(not p.is_keyword_only for p in parameters),
            tuple(native.MISS if p.default is None else p.default for p in parameters),
            self._otherwise,
            known.undifferentiated,
        )
        made.differentiate_by(_differentiable(known, made.forward))
        return made

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return an argument for each parameter, as it was given."""
        parameters = self._registration.definition.parameters
        named = dict(zip((p.name for p in parameters), args, strict=False)) | dict(kwargs)
        return [named.get(p.name, p.default) for p in parameters]


class DifferentiableCall(torch.autograd.Function):
    """A call of an operator whose gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, registration: Callee, *arguments: Any) -> Any:
        ctx.registration = registration
        registration.save(ctx, arguments)
        return registration.calls.fast(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        autograd_node.note_backward()
        needed, gradients = ctx.needs_input_grad[1:], ctx.registration.gradients
        return (None, *gradients(ctx.saved_tensors, ctx.numbers, needed, grads))


def _differentiable(registration: Callee, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls an operator so that gradients can be asked for, of all its arguments.

    Args:
        registration: The operator.
        forward: What the binding calls it by, which fills the context; it spares a frame of Python.
    """
    definition = registration.definition
    names, gradients = tuple(definition.numbers), registration.gradients

    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        autograd_node.note_backward()
        numbers = dict(zip(names, ctx.numbers, strict=True))
        return gradients(ctx.saved_tensors, numbers, ctx.needs_input_grad, grads)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    made: Any = type(f"CallOf_{definition.name}", (torch.autograd.Function,), methods)
    return direct_apply(made)


def _are_plain(operands: Sequence[Any]) -> bool:
    """Tell whether nothing but kernels and autograd has to see a call with such operands."""
    if not all(type(x) in _TENSORS and x.is_cpu for x in operands):
        return False
    return not (has_modes() or is_followed() or binding.is_awaited())


def _derives(operands: Sequence[Any]) -> bool:
    """Tell whether `torch.func` or forward mode differentiates."""
    if is_forward_mode():
        return True
    return has_transforms() and torch.is_grad_enabled() and any(x.requires_grad for x in operands)
