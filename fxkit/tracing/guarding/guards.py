"""Guards: what a captured graph assumes, each a value that can be checked and explained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.node import has_side_effect

from fxkit.analysis.type_inference.declared_types import declare_type
from fxkit.errors import CaptureError
from fxkit.ir.op import OPERATOR_NAME
from fxkit.ir.types import TensorType
from fxkit.torch_adapters.modes import count_dispatch_modes, count_function_modes
from fxkit.tracing.values.mode_scopes import Ambient, read_ambient
from fxkit.tracing.values.scalar_inputs import AnyScalar, with_free
from fxkit.tracing.values.sources import ValueSource
from fxkit.tracing.values.structure import Parts
from fxkit.tracing.values.texts import text_of


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How a call differs from what a guard expects.

    Attributes:
        what: What was looked at.
        expected: What the graph was captured with.
        got: What the call has.
        source: The user's line that used it, or None.
    """

    what: str
    expected: str
    got: str
    source: str | None = None

    def __str__(self) -> str:
        text = f"expected {self.what} to be {self.expected}, got {self.got}"
        return f"{text}\n  from:  {self.source}" if self.source else text


class GuardFailed(CaptureError):
    """A value that the captured program turned into a Python value is another one in this call."""

    def __init__(self, mismatch: Mismatch) -> None:
        self.mismatch = mismatch
        super().__init__(
            f"expected {mismatch.what} to be {mismatch.expected}, got {mismatch.got}",
            source=mismatch.source,
            hint="call the Captured program, which captures again, instead of its graph module",
        )


@has_side_effect  # else torch's own dead-code elimination drops the guard
def check_value(value: Any, expected: Any, what: str, source: str) -> None:
    """Go on only if the program would see the same Python value as when it was captured.

    Args:
        value: What the graph computed in this call.
        expected: What the program saw when it was captured.
        what: The value, for the message.
        source: The user's line that read it.

    Raises:
        GuardFailed: When they differ. NaN equals NaN; an int does not equal a float.
    """
    if value is not expected and not is_same(value, expected):
        raise GuardFailed(Mismatch(what, shorten(expected), shorten(value), source or None))


setattr(check_value, OPERATOR_NAME, "guard.check_value")


@declare_type(check_value)
def _nothing(*_: Any) -> None:
    """Return None: what a guard looks at may be another thing where types alone are known."""


def is_same(value: Any, expected: Any) -> bool:
    """Tell whether two plain values are of one type and equal, where NaN equals NaN."""
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(expected)
            and all(map(is_same, value, expected))
        )
    if type(value) is not type(expected):
        return False
    if isinstance(value, dict):
        same_keys = list(value) == list(expected)
        return same_keys and all(is_same(value[key], expected[key]) for key in value)
    if isinstance(value, complex):
        return is_same(value.real, expected.real) and is_same(value.imag, expected.imag)
    if isinstance(value, float):
        return value.hex() == expected.hex()
    return value == expected


def shorten(value: Any, limit: int = 80) -> str:
    """Return the value's text, cut to a line."""
    text = " ".join(text_of(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(frozen=True, slots=True)
class Guard:
    """One fact that a captured graph takes for granted.

    Attributes:
        what: What the fact is about: `args[0]`, `encoder.dropout`.
        source: The user's line that made the graph depend on it, or None.
    """

    what: str
    source: str | None = field(default=None, kw_only=True)

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return "as it was"

    def check(self, call: GuardedCall) -> Mismatch | None:
        """Return how `call` differs from the fact; None when it holds, or is checked later."""
        return None

    def describe(self) -> str:
        """Return the guard as a line of text."""
        text = f"{self.what} is {self.expected}"
        return f"{text}  ({self.source})" if self.source else text

    def _mismatch(self, got: str) -> Mismatch:
        return Mismatch(self.what, self.expected, got, self.source)


@dataclass(slots=True)
class GuardedCall:
    """What guards look at in one call.

    Attributes:
        parts: The arguments, taken apart.
        has_modes: Whether function or dispatch modes are active.
    """

    parts: Parts
    has_modes: bool
    _ambient: Ambient | None = None
    _defaults: tuple[Any, ...] | None = None

    @property
    def ambient(self) -> Ambient:
        """The gradient, inference and autocast modes, when first asked for."""
        if self._ambient is None:
            self._ambient = read_ambient()
        return self._ambient

    @property
    def defaults(self) -> tuple[Any, ...]:
        """What torch falls back on when a call does not say: default dtype and device."""
        if self._defaults is None:
            self._defaults = read_defaults()
        return self._defaults

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GuardedCall:
        """Take a call apart."""
        parts = Parts()
        for index, value in enumerate(args):
            parts.add(value, f"args[{index}]")
        for name, value in kwargs.items():
            parts.tokens.append(name)
            parts.paths.append(name)
            parts.add(value, name)
        has_modes = count_function_modes() > 0 or count_dispatch_modes() > 0
        return cls(parts, has_modes)


def read_defaults() -> tuple[Any, ...]:
    """Return the settings of this thread and process that calls without arguments fall back on."""
    has_modes = count_function_modes() > 0
    return (
        torch.get_default_dtype(),
        str(torch.get_default_device()) if has_modes else None,
        count_dispatch_modes(),
        torch.are_deterministic_algorithms_enabled(),
    )


@dataclass(frozen=True, slots=True)
class StructureGuard(Guard):
    """The arguments' nesting, and those of them that are not tensors.

    Attributes:
        free: Which tokens are numbers that the graph takes as inputs.
    """

    tokens: tuple[Any, ...]
    paths: tuple[str, ...]
    keep: tuple[Any, ...]
    free: frozenset[int] = frozenset()

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return f"{len(self.tokens)} values as when it was captured"

    def check(self, call: GuardedCall) -> Mismatch | None:
        tokens = with_free(call.parts.tokens, self.free)
        if len(tokens) == len(self.tokens) and tuple(tokens) == self.tokens:
            return None
        for ours, path, theirs in zip(self.tokens, self.paths, tokens, strict=False):
            if ours != theirs:
                return Mismatch(path, _token_text(ours), _token_text(theirs), self.source)
        counts = (f"{len(self.tokens)} values", f"{len(tokens)} values")
        return Mismatch("the arguments", *counts, self.source)


def _token_text(token: Any) -> str:
    if isinstance(token, str):
        return f"a keyword {token}"
    if token[0] == "tensor":
        return "a tensor"
    if token[0] == "same":
        return "an object that was given before"
    kind, detail = token[0], token[-1]
    if isinstance(detail, AnyScalar):
        return repr(detail)
    if kind is float:
        return repr(float.fromhex(detail))
    if kind in (list, tuple):
        return f"a {kind.__name__} of {detail}"
    if kind is dict and isinstance(detail, tuple):
        return f"a dict with keys {', '.join(map(str, detail[1]))}"
    if (isinstance(detail, int) and kind not in (int, bool)) or not isinstance(token[0], type):
        return f"an object of type {getattr(kind, '__qualname__', kind)}"
    return shorten(detail)


@dataclass(frozen=True, slots=True)
class TensorGuard(Guard):
    """The type of one tensor argument."""

    index: int
    kind: type
    type: TensorType
    layout: torch.layout

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return type_text(self.type, self.kind, self.layout)

    def has_type(self, found: TensorType) -> bool:
        """Tell whether a tensor of this type would do."""
        return found == self.type

    def check(self, call: GuardedCall) -> Mismatch | None:
        tensor, wanted = call.parts.tensors[self.index], self.type
        if (
            tensor.shape == wanted.shape
            and tensor.dtype is wanted.dtype
            and tensor.requires_grad == wanted.requires_grad
            and tensor.device == wanted.device
            and tensor.layout is self.layout
            and (wanted.stride is None or tensor.stride() == wanted.stride)
            and type(tensor) is self.kind
        ):
            return None
        return self._mismatch(tensor_text(tensor))


def tensor_text(tensor: torch.Tensor) -> str:
    """Return the type of a tensor with all that a guard compares."""
    return type_text(TensorType.of(tensor), type(tensor), tensor.layout)


def type_text(
    what: TensorType, kind: type = torch.Tensor, layout: torch.layout = torch.strided
) -> str:
    """Return what a guard on a tensor compares, as text."""
    parts = [str(what)]
    if layout is not torch.strided:
        parts.append(f"with layout {layout}")
    elif not what.is_contiguous:
        parts.append(f"with strides {what.stride}")
    parts.append(f"on {what.device}")
    if what.requires_grad:
        parts.append("requiring grad")
    if kind is not torch.Tensor:
        parts.append(f"of class {kind.__name__}")
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class ModesGuard(Guard):
    """Gradient, inference and autocast modes, and default dtype and device."""

    ambient: Ambient
    defaults: tuple[Any, ...]

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return modes_text(self.ambient, self.defaults)

    def check(self, call: GuardedCall) -> Mismatch | None:
        if call.ambient == self.ambient and call.defaults == self.defaults:
            return None
        return self._mismatch(modes_text(call.ambient, call.defaults))


def modes_text(ambient: Ambient, defaults: tuple[Any, ...]) -> str:
    """Return the modes as text."""
    dtype, device, dispatch_modes, deterministic = defaults
    parts = [str(ambient), f"default dtype {dtype}"]
    if device is not None:
        parts.append(f"default device {device}")
    if dispatch_modes:
        parts.append(f"{dispatch_modes} dispatch modes")
    if deterministic:
        parts.append("deterministic algorithms")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class OutsideGuard(Guard):
    """A parameter, buffer or other tensor that the graph holds is still in its places."""

    places: tuple[ValueSource, ...]
    tensor: torch.Tensor
    type: TensorType

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return type_text(self.type, type(self.tensor))

    def check(self, call: GuardedCall) -> Mismatch | None:
        for place in self.places:
            now = place.read()
            if now is not self.tensor:
                got = "another tensor" if isinstance(now, torch.Tensor) else shorten(now)
                return Mismatch(place.name, self.expected, got, self.source)
        now, wanted = self.tensor, self.type
        if (
            now.shape == wanted.shape
            and now.dtype is wanted.dtype
            and now.requires_grad == wanted.requires_grad
            and now.device == wanted.device
            and (wanted.stride is None or now.stride() == wanted.stride)
        ):
            return None
        return self._mismatch(tensor_text(now))


@dataclass(frozen=True, slots=True)
class ValueGuard(Guard):
    """A Python value that the program read out of a tensor; checked inside the graph.

    Attributes:
        value: The value that it read, of plain types only.
        node: Name of the graph's node that checks it.
    """

    value: Any
    node: str

    @property
    def expected(self) -> str:
        """The fact, as text."""
        return shorten(self.value)
