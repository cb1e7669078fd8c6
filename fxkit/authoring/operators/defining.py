"""What `fxkit.operator` and `fxkit.row_operator` share: their options, and that they decorate."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.own_gradients import check_gradients, with_gradient
from fxkit.authoring.operators.registration import Registration
from fxkit.errors import UnsupportedError

# Namespaces in which torch itself looks its operators up.
_OF_TORCH = frozenset(("aten", "prim", "prims", "quantized_decomposed", "higher_order"))

Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True)
class Options:
    """The options of an operator of one's own.

    Attributes:
        name: The operator's name; that of the function when left out.
        namespace: The namespace of `torch.ops` that has it.
        tolerance: Largest difference of a kernel from torch's composition of the same operations,
            in epsilons of the result's dtype, relative to `max(1, abs(result))`.
        gradient: A function that is read in the place of the derivative: it takes the gradient of
            each result, then what the operator takes, and returns the gradient of each tensor.
        check_gradient: Whether it is compared with differences of the operator; not so for one that
            is to differ, such as that of a rounding.
    """

    name: str | None = None
    namespace: str = "authored"
    tolerance: float = 16
    gradient: Callable[..., Any] | None = None
    check_gradient: bool = True


class Decorates(Protocol[Made]):
    """Makes an operator of a function, or with options a decorator that does."""

    @overload
    def __call__(self, function: Callable[..., Any], /) -> Made: ...

    @overload
    def __call__(
        self,
        *,
        name: str | None = None,
        namespace: str = "authored",
        tolerance: float = 16,
        gradient: Callable[..., Any] | None = None,
        check_gradient: bool = True,
    ) -> Callable[[Callable[..., Any]], Made]: ...


def decorates(make: Callable[[Callable[..., Any], Options], Made]) -> Decorates[Made]:
    """Return a decorator, with options or without, of what makes an operator of a function."""

    @functools.wraps(make)
    def decorate(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        given = Options(**options)
        return (lambda f: make(f, given)) if function is None else make(function, given)

    del decorate.__wrapped__  # whose parameters are others
    return decorate


def defined(
    function: Callable[..., Any],
    options: Options,
    read: Callable[[Callable[..., Any], str], Definition],
) -> tuple[Definition, Registration]:
    """Read a function, and register the operator that it defines.

    Args:
        function: The function.
        options: The options.
        read: Reads it, under a name.

    Raises:
        UnsupportedError: When the function can't be read.
        NumericsError: When a gradient of one's own is not that of the operator.
    """
    _check_namespace(options.namespace)
    definition = read(function, options.name or getattr(function, "__name__", ""))
    if options.gradient is not None:
        definition = with_gradient(definition, options.gradient)
        if options.check_gradient:
            check_gradients(definition)
    return definition, registered(definition, options.namespace, options.tolerance)


def _check_namespace(namespace: str) -> None:
    if not namespace.isidentifier() or keyword.iskeyword(namespace) or namespace in _OF_TORCH:
        raise UnsupportedError(
            f"expected a namespace of your own, got {namespace!r}",
            hint="pass namespace= a name of letters, digits and underscores, such as 'mylib'",
        )


_known: dict[str, Registration] = {}


def registered(definition: Definition, namespace: str, tolerance: float) -> Registration:
    """Return an operator, registered in the place of an earlier one of the same name."""
    qualified = f"{namespace}::{definition.name}"
    if qualified in _known:
        _known.pop(qualified).withdraw()
    _known[qualified] = Registration(definition, namespace, tolerance)
    return _known[qualified]
