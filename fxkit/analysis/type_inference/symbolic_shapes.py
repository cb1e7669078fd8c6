"""Sizes as expressions: torch's `ShapeEnv` behind one door, in `torch.export`'s notation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxkit.analysis.type_inference.fake_tensors import new_fake_mode
from fxkit.analysis.type_inference.type_facts import concrete_number
from fxkit.errors import UnsupportedError
from fxkit.ir.symbols import NAMES, Symbol, read_number
from fxkit.ir.types import TensorType
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.late_imports import FOR_SIZES, import_at_once
from fxkit.torch_adapters.symbolic_sizes import hint_of, is_derived, named_source, value_range

_STAND_IN = 6  # for an example size of 0 or 1, which torch would take for a fixed one


class SymbolicShapes:
    """The symbolic sizes of one run, and what was learnt of them.

    Attributes:
        mode: A fake mode whose sizes may be symbols.
    """

    def __init__(self) -> None:
        import_at_once(FOR_SIZES)
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._env = ShapeEnv()
        self.mode = new_fake_mode(self._env)
        self._named: dict[str, tuple[Any, int, int]] = {}
        self._must_stay_free: dict[Any, str] = {}
        self._seen = 0
        self._begun = 0
        self._askers: list[fx.Node] = []
        setattr(self._env, NAMES, {})

    def inputs(self, values: Mapping[str, Any], spec: Any) -> dict[str, Any]:
        """Return inputs with symbolic sizes.

        Args:
            values: The inputs, by the names of the graph's placeholders.
            spec: `dynamic_shapes` of `torch.export.export`: for each input, by name or position,
                None, a dict from axis to `Dim` (or a number, None, `Dim.AUTO`, `Dim.DYNAMIC`,
                `Dim.STATIC`), or a list with one entry an axis; for a nested input nested likewise.

        Raises:
            UnsupportedError: When the notation is of another kind, or does not fit the inputs.
        """
        by_name = _by_name(spec, list(values))
        with self.mode:
            return {
                name: self._free(value, by_name.get(name), name) for name, value in values.items()
            }

    def number_of_data(self) -> Any:
        """Return a new whole number that data decide."""
        return self._env.create_unbacked_symint()

    def _free(self, value: Any, spec: Any, path: str) -> Any:
        if spec is None:
            return value
        if isinstance(value, torch.Tensor):
            return self._free_tensor(value, spec, path)
        if isinstance(value, int):
            return self._size(spec, value, path)
        if isinstance(value, (list, tuple)) and isinstance(spec, (list, tuple)):
            items = [
                self._free(item, entry, f"{path}[{index}]")
                for index, (item, entry) in enumerate(zip(value, spec, strict=True))
            ]
            return type(value)(items)
        if isinstance(value, dict) and isinstance(spec, Mapping):
            return {
                key: self._free(item, spec.get(key), f"{path}[{key!r}]")
                for key, item in value.items()
            }
        raise _misfit(path, spec)

    def _free_tensor(self, tensor: torch.Tensor, spec: Any, path: str) -> torch.Tensor:
        axes = dict(spec) if isinstance(spec, Mapping) else dict(enumerate(_listed(spec, path)))
        if any(type(axis) is not int or not -tensor.dim() <= axis < tensor.dim() for axis in axes):
            raise _misfit(path, spec)
        wanted = {axis % tensor.dim(): entry for axis, entry in axes.items()}
        shape = [
            self._size(wanted.get(axis), size, f"{path}.shape[{axis}]")
            for axis, size in enumerate(tensor.shape)
        ]
        stride = like_strides(tensor.shape, tensor.stride(), shape)
        made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_() if tensor.requires_grad else made

    def _size(self, entry: Any, size: int, path: str) -> Any:
        """Return a size: the example's own, or a symbolic one."""
        if entry is None:
            return size
        if isinstance(entry, int):
            if entry != size:
                raise UnsupportedError(
                    f"expected size {entry} at {path}, as dynamic_shapes says, got {size}",
                    hint="make the example input fit",
                )
            return size
        hint = hint_of(entry)
        if hint is not None:
            if hint == "STATIC":
                return size
            name = self._next_name()
            low, high = entry.min, entry.max
            stays = hint == "DYNAMIC"
            symbol, example, _ = self._symbol(name, size, low, high, stays)
            return self._number(symbol, example)
        if is_derived(entry):
            return self._derived(entry, size, path)
        if isinstance(entry, str) or hasattr(entry, "__name__"):
            name = entry if isinstance(entry, str) else entry.__name__
            low, high = getattr(entry, "min", None), getattr(entry, "max", None)
            return self._number(*self._root(name, size, low, high, path))
        raise _misfit(path, entry)

    def _derived(self, entry: Any, size: int, path: str) -> Any:
        """Return `a * root + b`."""
        root, offset = entry.root, entry.fn(0)
        factor = entry.fn(1) - offset
        if (size - offset) % factor:
            raise _misfit(path, entry.__name__)
        given = (size - offset) // factor
        symbol, example = self._root(root.__name__, given, root.min, root.max, path)
        return self._number(entry.fn(symbol), entry.fn(example))

    def _root(
        self, name: str, size: int, low: int | None, high: int | None, path: str
    ) -> tuple[Any, int]:
        if name not in self._named:
            self._named[name] = self._symbol(name, size, low, high, stays=True)
        symbol, example, given = self._named[name]
        if given != size:
            raise UnsupportedError(
                f"expected the same {name} everywhere, got {given} and {size} at {path}",
                hint="give sizes that may differ Dims of different names",
            )
        return symbol, example

    def _symbol(
        self, name: str, size: int, low: int | None, high: int | None, stays: bool
    ) -> tuple[Any, int, int]:
        """Return a new symbol, the size to decide by, and the example's size."""
        import sympy
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StrictMinMaxConstraint

        highest = high if type(high) is int else None
        lowest = max(low or 0, 2)
        example = size if size > 1 else min(max(lowest, _STAND_IN), highest or _STAND_IN)
        constraint = None
        if lowest > 2 or highest is not None:
            limits = value_range(lowest, highest)
            constraint = StrictMinMaxConstraint(vr=limits, warn_only=False)
        symbol = self._env.create_symbol(
            example, named_source(f"size {name}"), DimDynamic.DYNAMIC, constraint
        )
        getattr(self._env, NAMES)[symbol] = sympy.Symbol(name, integer=True, positive=True)
        if stays:
            self._must_stay_free[symbol] = name
        self._begun = len(self._env.guards)
        return symbol, example, size

    def _number(self, expression: Any, example: int) -> Any:
        return self._env.create_symintnode(expression, hint=example)

    def _next_name(self) -> str:
        taken = {str(symbol) for symbol in getattr(self._env, NAMES).values()}
        return next(name for n in range(len(taken) + 1) if (name := f"s{n}") not in taken)

    # What was learnt.

    def fixed(self, node: fx.Node) -> tuple[str, Any] | None:
        """Return a size that should stay free and turned out to have one value only, if any.

        Args:
            node: The node at which something may have been learnt since the last call.
        """
        self._askers += [node] * (len(self._env.guards) - len(self._askers))
        replaced = self._env.replacements
        if len(replaced) == self._seen:
            return None
        self._seen = len(replaced)
        for symbol, name in self._must_stay_free.items():
            value = replaced.get(symbol)
            if value is not None and value.is_number:
                return name, value
        return None

    def relations(self) -> list[tuple[Symbol, fx.Node | None]]:
        """Return what was assumed of the symbolic sizes, each with the node that asked for it."""
        names = getattr(self._env, NAMES)
        found = []
        for index, guard in enumerate(self._env.guards):
            node = self._askers[index] if index < len(self._askers) else None
            found.append((Symbol(guard.expr.xreplace(names), kind=bool), node))
        return found

    @property
    def learnt(self) -> int:
        """How many symbols turned out to equal another expression."""
        return len(self._env.replacements)

    def assumptions(self) -> tuple[str, ...]:
        """Return what was taken to hold of the symbols on the way."""
        names = getattr(self._env, NAMES)
        found = [guard.expr for guard in self._env.guards[self._begun :]]
        texts = [_relation(expression.xreplace(names)) for expression in found]
        for symbol, value in self._env.replacements.items():
            if symbol not in names:
                texts.append(f"{symbol} == {value.xreplace(names)}")
        return tuple(dict.fromkeys(texts))

    def simplify(self, value_type: Any) -> Any:
        """Return a type with the expressions written as what they turned out to equal."""
        return pytree.tree_map(self._simplify_leaf, value_type)

    def _simplify_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Symbol) and leaf.node is not None:
            return read_number(concrete_number(leaf))
        if not isinstance(leaf, TensorType) or not leaf.is_symbolic:
            return leaf
        shape = tuple(map(self._simplify_leaf, leaf.shape))
        stride = None if leaf.stride is None else tuple(map(self._simplify_leaf, leaf.stride))
        return TensorType(shape, leaf.dtype, stride, leaf.device, leaf.requires_grad)


def _by_name(spec: Any, names: list[str]) -> dict[str, Any]:
    if isinstance(spec, Mapping):
        unknown = [name for name in spec if name not in names]
        if unknown:
            raise UnsupportedError(
                f"expected names of inputs in dynamic_shapes, got {', '.join(map(str, unknown))}",
                hint=f"the inputs are {', '.join(names)}",
            )
        return dict(spec)
    if isinstance(spec, (list, tuple)) and len(spec) <= len(names):
        return dict(zip(names, spec, strict=False))
    raise _misfit("the inputs", spec)


def _relation(expression: Any) -> str:
    operator = getattr(expression, "rel_op", None)
    if operator is None:
        return str(expression)
    return f"{expression.lhs} {operator} {expression.rhs}"


def _listed(spec: Any, path: str) -> Any:
    if isinstance(spec, (list, tuple)):
        return spec
    raise _misfit(path, spec)


def _misfit(path: str, spec: Any) -> UnsupportedError:
    return UnsupportedError(
        f"expected dynamic_shapes that fit {path}, got {spec!r}",
        hint="write None, {axis: Dim} or a list of one entry an axis, as for torch.export.export",
    )


def like_strides(example: Sequence[int], strides: Sequence[int], shape: Sequence[Any]) -> list[Any]:
    """Return strides for a shape with other sizes, whose elements lie as those of an example do.

    Args:
        example: Shape of the example.
        strides: Its strides; those that no density explains are kept as they are.
        shape: The other shape; its sizes may be symbolic.
    """
    found: list[Any] = list(strides)
    expected: int = 1
    free: Any = 1
    order = sorted(range(len(found)), key=lambda axis: (found[axis], -axis))
    for axis in order:
        if strides[axis] == expected or example[axis] == 1:
            found[axis] = free
            expected *= max(example[axis], 1)
            free = free * shape[axis]
    return found
