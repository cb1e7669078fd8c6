"""The memory that a graph writes to: which tensors show it, and how each is taken from another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.effects import AliasSets, effects_of
from fxkit.analysis.tensor_types import infer_type
from fxkit.ir.binding import bind_function
from fxkit.ir.op import Call, resolve
from fxkit.ir.op_table import GIVES_ITSELF, UNDECLARED_ALIASES
from fxkit.ir.types import MEMORY_KEY, TensorType, set_type, type_of
from fxkit.passes.decomposition.functional_forms import (
    FunctionalForm,
    functional_form,
    is_shape_change,
    without_writing,
    write_back,
)
from fxkit.passes.layout.view_inverses import Inverse, inverse_of, shares_memory
from fxkit.torch_adapters.operators import schema_of


@dataclass(frozen=True)
class View:
    """The call that takes a tensor from another one.

    Attributes:
        call: What is called, with its arguments by name.
        target: The function, called with `args` and `kwargs`.
        shown: The operand of which it is a view.
        part: Which of several results is meant; None for the only one.
        inverse: How a new value goes back into the base; None when that is not known.
    """

    call: Call
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shown: fx.Node
    part: int | None = None
    inverse: Inverse | None = None


@dataclass(eq=False)
class Tensor:
    """A tensor of the program: memory of its own, or a view of another.

    Attributes:
        node: What made it.
        known: Its type.
        base: What it is a view of.
        view: How it is taken from its base.
        later: What its nodes stand for since their shape was changed in place.
        value: Its present value, as of `seen` writes to its memory.
        writes: How often its memory was written, if it is an owner.
        has_views: Whether others are views of it.
    """

    node: fx.Node
    known: TensorType
    base: Tensor | None = None
    view: View | None = None
    later: Tensor | None = None
    value: fx.Node = field(init=False)
    seen: int = 0
    writes: int = 0
    has_views: bool = False

    def __post_init__(self) -> None:
        self.value = self.node
        if self.base is not None:
            self.base.has_views = True

    @property
    def owner(self) -> Tensor:
        """The tensor whose memory it shows."""
        owner = self
        while owner.base is not None:
            owner = owner.base
        return owner

    @property
    def is_outside(self) -> bool:
        """Whether it is an input or an attribute."""
        return self.node.op in ("placeholder", "get_attr")


def _is_laid_out_by_a_library(node: fx.Node) -> bool:
    """Tell whether LAPACK or its like decides the strides of `out=`, which torch's fakes guess."""
    name = str(node.target).removeprefix("aten.")
    return name.startswith(("linalg_", "geqrf", "_linalg"))


class WrittenMemory:
    """What a graph writes to, as far as it is understood; nothing is changed.

    Attributes:
        aliases: Which nodes may share memory.
        tensors: What each node stands for when it is made.
        forms: The calls that write and have a functional form.
        reshaped: The calls that change a tensor's shape in place: what it is from then on.
        resized: For calls with `out=`, the tensors that they resize, with types before and after.
        refused: For the memory that stays as it is, why.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.aliases = AliasSets(graph)
        inputs = graph.find_nodes(op="placeholder")
        self._inputs = Counter(node.meta.get(MEMORY_KEY) for node in inputs)
        self.tensors: dict[fx.Node, Tensor] = {}
        self.forms: dict[fx.Node, FunctionalForm] = {}
        self.reshaped: dict[fx.Node, Tensor] = {}
        self.resized: dict[fx.Node, dict[Tensor, tuple[TensorType, TensorType]]] = {}
        self.refused: dict[fx.Node, str] = {}
        self._attributes: dict[str, Tensor] = {}
        self._parts: dict[fx.Node, tuple[Tensor, fx.Node]] = {}
        self._called_graphs: list[fx.Node] = []
        # Tensors whose shape some other node depends on, beside those that stand for them.
        self._not_alone: set[Tensor] = set()
        self._switches_grad = any(effects_of(n).is_global for n in self.aliases.effectful)
        for node in graph.nodes:
            if node.op != "output" and self._is_concerned(node):
                reason = self._look_at(node)
                if reason is not None:
                    self._refuse(node, reason)
        self.forms = {n: f for n, f in self.forms.items() if not self.is_refused(n)}
        self.reshaped = {n: t for n, t in self.reshaped.items() if not self.is_refused(n)}
        for tensor in self.tensors.values():
            tensor.later = None

    @property
    def has_work(self) -> bool:
        """Whether anything is written that can be made values, before the end of the graph."""
        done = write_back(self.graph)
        return any(node not in done for node in (*self.forms, *self.reshaped))

    def now(self, node: fx.Node) -> Tensor | None:
        """Return what a node stands for at present."""
        tensor = self.tensors.get(node)
        while tensor is not None and tensor.later is not None:
            tensor = tensor.later
        return tensor

    def is_refused(self, node: fx.Node) -> bool:
        """Tell whether the memory that a node shows or writes stays as it is."""
        return any(self.aliases.root(one) in self.refused for one in _touched(node))

    def notes(self) -> Iterator[str]:
        """Yield what stays as it is, and why."""
        for root, reason in self.refused.items():
            yield f"writes to the memory of %{root.name} stay: {reason}"
        for node in self._called_graphs:
            yield (
                f"%{node.name} calls a graph of its own: run functionalise before what split the "
                "graph, or put it back with fxkit.analysis.slices.inline"
            )

    def left(self) -> dict[fx.Node, str]:
        """Return the calls that go on writing, or may, and why."""
        found: dict[fx.Node, str] = {}
        for node in self.aliases.effectful:
            for one in _touched(node):
                reason = self.refused.get(self.aliases.root(one))
                if reason is not None:
                    found.setdefault(node, reason)
        return found

    def _is_concerned(self, node: fx.Node) -> bool:
        return bool(effects_of(node).writes) or self.aliases.is_written(node)

    def _refuse(self, node: fx.Node, reason: str) -> None:
        for one in _touched(node):
            self.refused.setdefault(self.aliases.root(one), reason)

    def _known(self, node: fx.Node) -> Any:
        """Return the type that a node has at present."""
        tensor = self.now(node)
        return type_of(node) if tensor is None else tensor.known

    def _look_at(self, node: fx.Node) -> str | None:
        """Take note of a node that makes, shows or writes memory; return what is in the way."""
        effects, known = effects_of(node), type_of(node)
        if effects.is_opaque:
            call = resolve(node)
            if call is not None and call.name == "opaque.torch.fx.GraphModule":
                self._called_graphs.append(node)
            return f"nothing is known of %{node.name}"
        if effects.writes:
            return self._look_at_write(node)
        if node.op in ("placeholder", "get_attr"):
            return self._look_at_outside(node, known)
        if effects.aliases and node not in self.tensors and not self._takes_result(node):
            return self._look_at_view(node, known)
        if isinstance(known, TensorType) and node not in self.tensors:
            self.tensors[node] = Tensor(node, known)
        return None

    def _takes_result(self, node: fx.Node) -> bool:
        """Tell whether a node takes a new result of a call that writes."""
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        return source in self.forms and source not in self.tensors

    def _look_at_outside(self, node: fx.Node, known: Any) -> str | None:
        if not isinstance(known, TensorType):
            return None
        if node.op == "placeholder":
            self.tensors[node] = Tensor(node, known)
            return "inputs share memory" if self._has_shared_memory(node) else None
        path = str(node.target)
        tensor = self._attributes.setdefault(path, Tensor(node, known))
        self.tensors[node] = tensor
        if known.requires_grad:
            return f"{path} wants a gradient"
        others = [t for p, t in self._attributes.items() if p != path]
        tied = any(self.aliases.may_alias(t.node, node) for t in others)
        return f"{path} shares memory with another attribute" if tied else None

    def _has_shared_memory(self, placeholder: fx.Node) -> bool:
        memory = placeholder.meta.get(MEMORY_KEY)
        return memory is not None and self._inputs[memory] > 1

    # Views.

    def _look_at_view(self, node: fx.Node, known: Any) -> str | None:
        call = resolve(node)
        if call is not None and call.name == "python.getitem" and node.args[0] in self._parts:
            part = call.arguments["1"]
            source, view = self._parts[node.args[0]]  # type: ignore[index]
        else:
            try:
                shown = shares_memory(node, self._known)
            except LookupError as reason:
                return str(reason)
            if shown is None:
                if isinstance(known, TensorType):
                    self.tensors[node] = Tensor(node, known)
                return None
            source, view, part = self.now(shown), node, None
            if source is None:
                return f"it is not known what %{shown.name} holds"
            if not isinstance(known, TensorType):
                self._parts[node] = source, shown
                return None
        if not isinstance(known, TensorType):
            return f"it is not known what %{node.name} holds"
        if part is not None:
            shown, view = view, node.args[0]
        self.tensors[node] = self._view(source, node, known, view, shown, part)
        return None

    def _view(
        self, source: Tensor, node: fx.Node, known: TensorType, view: Any, shown: Any, part: Any
    ) -> Tensor:
        """Return the tensor that a call takes from another."""
        call, index = resolve(view), part if type(part) is int else None
        assert call is not None
        inverse = inverse_of(call, type_of(view), source.known, index)
        taken = View(call, view.target, view.args, view.kwargs, shown, index, inverse)
        tensor = Tensor(node, known, source, taken)
        others = (self.now(o) for o in view.all_input_nodes if o is not shown)
        self._not_alone.update(other for other in others if other is not None)
        if call.name in _PERHAPS_THE_SAME:
            self._not_alone.update((tensor, source))
        return tensor

    # Writes.

    def _look_at_write(self, node: fx.Node) -> str | None:
        call = resolve(node)
        if call is not None and is_shape_change(call):
            return self._look_at_shape_change(node, call)
        form = "nothing is known of it" if call is None else functional_form(call)
        if call is None or isinstance(form, str):
            return str(form)
        written = form.operands(call)
        for operand in written:
            reason = self._objection(operand)
            if reason is not None:
                return reason
        targets = [self.now(operand) for operand in written]
        owners = {target.owner for target in targets if target is not None}
        if len(owners) < len(targets):
            return f"%{node.name} writes to the same memory more than once"
        self.forms[node] = form
        return self._take_results(node, call, form)

    def _objection(self, written: Any) -> str | None:
        tensor = self.now(written) if isinstance(written, fx.Node) else None
        if tensor is None:
            return f"it is not known what {written} holds"
        if self._switches_grad and tensor.known.requires_grad:
            return "it wants a gradient, and gradients are switched on or off"
        while tensor.base is not None:
            if tensor.view is None or tensor.view.inverse is None:
                return f"it is written through %{tensor.node.name}"
            tensor = tensor.base
        return None

    def _take_results(self, node: fx.Node, call: Call, form: FunctionalForm) -> str | None:
        """Take note of what a writing call returns: what it wrote, or new tensors."""
        known, written = type_of(node), form.operands(call)
        several = isinstance(known, (list, tuple))
        types = list(known) if several else [known]
        if form.returns and len(types) != len(form.returns):
            return f"it is not known what %{node.name} returns"
        takers: dict[int, list[fx.Node]] = {index: [] for index in range(len(types))}
        for user in node.users if several else ():
            taken = resolve(user)
            index = None if taken is None else taken.arguments.get("1")
            is_part = taken is not None and taken.name == "python.getitem"
            if is_part and type(index) is int and index in takers:
                takers[index].append(user)
            elif user.op != "output":
                return f"the results of %{node.name} are taken whole"
        for index, position in enumerate(form.returns):
            nodes = takers[index] if several else [node]
            target = None if position is None else self.now(written[position])
            if target is None:
                self.tensors.update(
                    (n, Tensor(n, types[index])) for n in nodes if type(types[index]) is TensorType
                )
                continue
            self.tensors.update(dict.fromkeys(nodes, target))
            reason = self._resize(node, target, types[index])
            if reason is not None:
                return reason
        return None

    def _resize(self, node: fx.Node, target: Tensor, known: Any) -> str | None:
        """Let a tensor have the shape that a call with `out=` gives it."""
        if not isinstance(known, TensorType):
            return f"it is not known what %{node.name} returns"
        if known.shape == target.known.shape:
            is_doubtful = known.numel == 0 and not _gives_shape(node, known)
            return f"torch does not say which shape %{node.name} gives it" if is_doubtful else None
        if target.base is not None or target.has_views or target.is_outside:
            return f"%{node.name} resizes memory that others show"
        if _is_laid_out_by_a_library(node):
            return f"torch does not say how %{node.name} lays out what it resizes"
        self.resized.setdefault(node, {})[target] = target.known, known
        target.known = known
        return None

    def _look_at_shape_change(self, node: fx.Node, call: Call) -> str | None:
        """Let a tensor be a view of what it was: `y.t_()` makes `y` a `y.t()`."""
        operand, known = call.arguments["self"], type_of(node)
        source = self.now(operand) if isinstance(operand, fx.Node) else None
        plain = without_writing(call.operator.overload)
        if source is None or not isinstance(known, TensorType):
            return f"it is not known what {operand} holds"
        if plain is None or schema_of(plain).returns[0].alias_info is None:
            return f"{call.operator.overload} makes a tensor show other memory"
        if source.node.op == "get_attr":
            return f"%{node.name} changes the shape of the attribute {source.node.target}"
        if source in self._not_alone:
            return f"%{node.name} changes the shape of a tensor that others may be, or ask for"
        args, kwargs = node.args, dict(node.kwargs)
        call = bind_function(plain, args, kwargs)
        if known == source.known and call.name != "aten.as_strided":
            self.tensors[node] = self.reshaped[node] = source
            return None
        inverse = inverse_of(call, known, source.known, None)
        view = View(call, plain, args, kwargs, operand, None, inverse)
        later = Tensor(node, known, source, view)
        source.later = self.reshaped[node] = self.tensors[node] = later
        return None


# Calls whose result may be the very tensor that they are given, and not only its memory.
_PERHAPS_THE_SAME = GIVES_ITSELF | UNDECLARED_ALIASES


def _gives_shape(node: fx.Node, known: TensorType) -> bool:
    """Tell whether a call writes a tensor of a shape, by what its functional form returns.

    On fake tensors some operators with `out=`, such as `linalg.solve`, leave an empty one empty.
    """
    call, graph = resolve(node), fx.Graph()
    assert call is not None
    form = functional_form(call)
    assert isinstance(form, FunctionalForm)
    operands = {operand: graph.placeholder(operand.name) for operand in node.all_input_nodes}
    for operand, placeholder in operands.items():
        set_type(placeholder, type_of(operand))

    def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        infer_type(made)
        return made

    values, _ = form.compute(emit, call, lambda v: map_arg(v, operands.__getitem__))
    shapes = [one.shape for one in map(type_of, values) if isinstance(one, TensorType)]
    return known.shape in shapes


def _touched(node: fx.Node) -> list[fx.Node]:
    return [node, *(w for w in effects_of(node).writes if isinstance(w, fx.Node))]
