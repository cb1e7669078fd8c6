"""What decides the type of a result: a tensor's type, and the little beside it that can matter.

Facts are interned: two tensors of which the same is known share one object, so that comparing and
hashing cost nothing. A tensor is made from facts again (`materialise`) to run an operator on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fxkit.ir.symbols import SYM_TYPES, Symbol, is_data_symbol, read_number
from fxkit.ir.types import TensorType
from fxkit.torch_adapters import pytree
from fxkit.torch_adapters.fake_tensors import tensor_class
from fxkit.torch_adapters.tensors import is_view_of_another

WHOLE = -1  # the storage is just what the elements span


class Core:
    """What decides the type of a result that shares no memory with its operands.

    Attributes:
        type: The tensor's type.
        is_conj: Whether its elements are stored conjugated.
        is_neg: Whether its elements are stored negated.
        is_plain: Whether these facts are all there is: false for sparse, quantised and nested
            tensors and for subclasses.
        is_symbolic: Whether a size is an expression.
    """

    __slots__ = ("is_conj", "is_neg", "is_plain", "is_symbolic", "type")

    def __init__(self, known: TensorType, is_conj: bool, is_neg: bool, is_plain: bool) -> None:
        self.type = known
        self.is_conj = is_conj
        self.is_neg = is_neg
        self.is_plain = is_plain
        self.is_symbolic = known.is_symbolic


class TypeFacts:
    """All that is known of a tensor.

    Attributes:
        core: What is enough for most operators.
        type: The tensor's type.
        offset: Where its elements begin in its storage.
        nbytes: Size of its storage, or `WHOLE`.
        is_view: Whether it is a view of another tensor.
        is_leaf: Whether autograd took no part in making it.
    """

    __slots__ = ("core", "is_leaf", "is_view", "nbytes", "offset", "type")

    def __init__(self, core: Core, offset: Any, nbytes: Any, is_view: bool, is_leaf: bool) -> None:
        self.core = core
        self.type = core.type
        self.offset = offset
        self.nbytes = nbytes
        self.is_view = is_view
        self.is_leaf = is_leaf


_PLAIN_CLASSES: set[type] = {torch.Tensor, nn.Parameter, nn.Buffer}


class FactTable:
    """Gives equal facts the same object.

    Args:
        shared: A table to keep facts without expressions in, so that they outlive this one.
    """

    def __init__(self, shared: FactTable | None = None) -> None:
        self._own: dict[Any, Any] = {}
        self._shared = self._own if shared is None else shared._own

    def __len__(self) -> int:
        return len(self._own)

    def clear(self) -> None:
        """Forget all."""
        self._own.clear()

    def of(self, tensor: torch.Tensor, *, is_result: bool = False) -> TypeFacts:
        """Return the facts of a tensor: real, fake or on the meta device.

        Args:
            tensor: The tensor.
            is_result: Whether it was made by a call on tensors that were made from facts.
        """
        known = TensorType.of(tensor)
        if known.stride is None or not _is_plain(tensor):
            return self._facts(self._core(known, False, False, False), 0, WHOLE, False, True)
        core = self._core(known, tensor.is_conj(), tensor.is_neg(), True)
        is_leaf = _is_leaf(tensor) if known.requires_grad else True
        if not is_view_of_another(tensor):
            is_made = is_result or is_fake(tensor)
            offset = read_number(tensor.storage_offset()) if is_made else 0
            return self._facts(core, offset, WHOLE, False, is_leaf)
        offset = read_number(tensor.storage_offset())
        nbytes = read_number(tensor.untyped_storage().nbytes())
        if offset == 0 and nbytes == span_of(known):
            nbytes = WHOLE
        return self._facts(core, offset, nbytes, True, is_leaf)

    def of_type(self, known: TensorType) -> TypeFacts:
        """Return the facts of a fresh tensor of a type."""
        core = self._core(known, False, False, known.stride is not None)
        return self._facts(core, 0, WHOLE, False, not known.requires_grad)

    def of_types(self, value_type: Any) -> Any:
        """Replace each type in what `type_of` gives by the facts of a fresh tensor."""
        if type(value_type) is TensorType:
            return self.of_type(value_type)
        return pytree.tree_map_only(TensorType, self.of_type, value_type)

    def _core(self, known: TensorType, is_conj: bool, is_neg: bool, is_plain: bool) -> Core:
        key = (known, is_conj, is_neg, is_plain)
        core = self._shared.get(key) or self._own.get(key)
        if core is None:
            core = Core(known, is_conj, is_neg, is_plain)
            (self._own if core.is_symbolic else self._shared)[key] = core
        return core

    def _facts(self, core: Core, *rest: Any) -> TypeFacts:
        key = (core, *rest)
        table = self._own if core.is_symbolic else self._shared
        facts = table.get(key)
        if facts is None:
            facts = table[key] = TypeFacts(core, *rest)
        return facts

    def abstract(self, value: Any) -> Any:
        """Replace each tensor in a nested value by its facts, torch's symbolic numbers by ours."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, torch.Tensor):
            return self.of(value)
        if kind is tuple or kind is list:
            return kind(self.abstract(item) for item in value)
        return pytree.tree_map_only((torch.Tensor, *SYM_TYPES), self._leaf, value)

    def of_results(self, value: Any) -> Any:
        """Replace each real tensor in what a call on made tensors returned by its facts."""
        return pytree.tree_map_only(torch.Tensor, lambda it: self.of(it, is_result=True), value)

    def _leaf(self, value: Any) -> Any:
        return self.of(value) if isinstance(value, torch.Tensor) else read_number(value)


_SCALARS = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device})


def types_of(value: Any) -> Any:
    """Replace facts in a nested value by types."""
    kind = type(value)
    if kind is TypeFacts:
        return value.type
    if kind in _SCALARS:
        return value
    if kind is tuple or kind is list:
        return kind(types_of(item) for item in value)
    return pytree.tree_map_only(TypeFacts, lambda facts: facts.type, value)


def with_operands(result: Any, made: Iterable[tuple[torch.Tensor, TypeFacts]]) -> Any:
    """Put their facts in the place of operands that a call returned as they are.

    Args:
        result: What the call returned.
        made: Its operands, and what they were made from.
    """
    same = {id(tensor): facts for tensor, facts in made}
    if not any(id(leaf) in same for leaf in pytree.tree_leaves(result)):
        return result
    return pytree.tree_map(lambda leaf: same.get(id(leaf), leaf), result)


def facts_in(value: Any) -> list[TypeFacts]:
    """Return the facts in a nested value, in order."""
    if type(value) is TypeFacts:
        return [value]
    if type(value) in _SCALARS:
        return []
    return [leaf for leaf in pytree.tree_leaves(value) if type(leaf) is TypeFacts]


def symbols_in(value: Any) -> list[Symbol]:
    """Return the expressions in a nested value's sizes, strides and numbers."""
    found: list[Symbol] = []
    for leaf in pytree.tree_leaves(value):
        known = leaf.type if type(leaf) is TypeFacts else leaf
        parts = (*known.shape, *(known.stride or ())) if type(known) is TensorType else (known,)
        found += [part for part in parts if type(part) is Symbol]
    return found


def data_symbols_in(value: Any) -> set[str]:
    """Return the names of the symbols in a nested value that the data decide."""
    parts = {str(part) for symbol in symbols_in(value) for part in symbol.expression.free_symbols}
    return {name for name in parts if is_data_symbol(name)}


def materialise(facts: TypeFacts, *, keep_grad: bool = False) -> torch.Tensor:
    """Make a tensor of these facts; inside a fake mode it takes no memory.

    Args:
        facts: What the tensor is to be like.
        keep_grad: Make one that autograd made, where the facts say so.
    """
    known = facts.type
    shape, stride = concrete_numbers(known.shape), concrete_numbers(known.stride)
    with torch.no_grad():
        if facts.nbytes == WHOLE and type(facts.offset) is int and facts.offset == 0:
            made = torch.empty_strided(shape, stride, dtype=known.dtype, device=known.device)
        else:
            made = _inside_of_storage(facts, shape, stride)
        if facts.core.is_conj:
            made = torch.ops.aten._conj(made)
        if facts.core.is_neg:
            made = torch.ops.aten._neg_view(made)
    if not known.requires_grad:
        return made
    if facts.is_leaf or facts.is_view or not keep_grad:
        return made.requires_grad_()
    return made_by_autograd(made)


def made_by_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one that autograd has made: it needs a gradient, and may be written to.

    Raises:
        RuntimeError: When elements share memory.
    """
    with torch.enable_grad():
        one = torch.ones((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)
        return tensor.add_(one)


def _inside_of_storage(facts: TypeFacts, shape: Any, stride: Any) -> torch.Tensor:
    known = facts.type
    nbytes = span_of(known) if facts.nbytes == WHOLE else facts.nbytes
    count = nbytes // known.dtype.itemsize if type(nbytes) is int else _elements(nbytes, known)
    if facts.nbytes == WHOLE:
        count = count + facts.offset
    (count, offset) = concrete_numbers((count, facts.offset))
    whole = torch.empty((count,), dtype=known.dtype, device=known.device)
    return whole.as_strided(shape, stride, offset)


def _elements(nbytes: Any, known: TensorType) -> Any:
    """Return a symbolic number of bytes as a number of elements."""
    return concrete_numbers((nbytes,))[0] // known.dtype.itemsize


def concrete(value: Any, make: Callable[[TypeFacts], torch.Tensor]) -> Any:
    """Replace facts in a nested value by tensors, our symbolic numbers by torch's."""
    kind = type(value)
    if kind is TypeFacts:
        return make(value)
    if kind is int or kind is bool or kind is float:
        return value
    return pytree.tree_map(
        lambda leaf: make(leaf) if type(leaf) is TypeFacts else concrete_number(leaf), value
    )


def concrete_numbers(values: Any) -> Any:
    """Return a tuple with torch's symbolic numbers in place of ours."""
    return tuple(concrete_number(value) for value in values)


def concrete_number(value: Any) -> Any:
    """Return torch's symbolic number for ours; anything else as it is."""
    if type(value) is not Symbol or value.node is None:
        return value
    wrap = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}[value.kind]
    return wrap(value.node)


def is_fake(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is one of torch's fake tensors."""
    return isinstance(tensor, tensor_class())


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view made in no_grad, whose base was written to since
        return False


def _is_plain(tensor: torch.Tensor) -> bool:
    is_usual = type(tensor) in _PLAIN_CLASSES or is_fake(tensor)
    return is_usual and not (tensor.is_quantized or tensor.is_nested)


def span_of(known: TensorType) -> Any:
    """Return how many bytes the elements of a strided tensor span, gaps included."""
    last: Any = 0
    for size, stride in zip(known.shape, known.stride or (), strict=True):
        if type(size) is int and size == 0:
            return 0
        last = last + (size - 1) * stride
    return (last + 1) * known.dtype.itemsize


def fake_value(value_type: Any) -> Any:
    """Make a value of a recorded type; inside `fake_mode` its tensors take no memory."""
    if isinstance(value_type, TensorType):
        shape = concrete_numbers(value_type.shape)
        place = {"dtype": value_type.dtype, "device": value_type.device}
        if value_type.stride is None:
            return torch.empty(shape, **place)
        return torch.empty_strided(shape, concrete_numbers(value_type.stride), **place)
    if isinstance(value_type, (tuple, list)) and not isinstance(value_type, torch.Size):
        return type(value_type)(fake_value(v) for v in value_type)
    if isinstance(value_type, dict):
        return {key: fake_value(v) for key, v in value_type.items()}
    return concrete_number(value_type)
