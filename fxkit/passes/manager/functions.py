"""Functions as passes: those written for fxkit, by a decorator, and those written for torch.fx.

@pass_function(numerics="changed")
def use_relu6(edit, context):
    for found in fxkit.graph(edit.gm).find(torch.relu):
        node = found.fx_node
        edit.replace(node, edit.call(F.relu6, *node.args, before=node))
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, overload

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.errors import PassError
from fxkit.ir.attributes import find_attribute
from fxkit.ir.graph_copies import copy_graph_module
from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext

Apply = Callable[..., None]


@dataclass(frozen=True)
class Contract:
    """What a pass says of itself; see `Pass`."""

    requires: tuple[str, ...] = ()
    ensures: tuple[str, ...] = ()
    preserves: tuple[str, ...] = ()
    is_idempotent: bool = True
    numerics: str = "exact"


@dataclass(frozen=True)
class DecoratedPass(Pass):
    """A function of a session and a context as a pass; `pass_function` makes it.

    Calling it with options gives the same pass with those options: `use_relu6(limit=3)`.

    Attributes:
        function: Changes the graph through the session it is given.
        options: Keyword arguments for the function.
    """

    function: Apply
    contract: Contract
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            object.__setattr__(self, name, getattr(self.function, name, None))
        for option in fields(self.contract):
            object.__setattr__(self, option.name, getattr(self.contract, option.name))

    @property
    def decorated(self) -> Any:
        """What the decorator left in the function's module: this pass without its options."""
        home = sys.modules.get(self.function.__module__)
        return getattr(home, self.name, self)

    def __call__(self, **options: Any) -> DecoratedPass:
        """Return the same pass with other options.

        Raises:
            PassError: When the function has no such option.
        """
        known = list(inspect.signature(self.function).parameters)[2:]
        for name in options:
            if name not in known:
                raise PassError(
                    f"expected an option of {self.name}, got {name!r}",
                    hint=f"it has {', '.join(known)}" if known else "it has none",
                )
        return replace(self, options={**self.options, **options})

    @property
    def name(self) -> str:
        """The function's name."""
        return _name_of(self.function)

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({shown})" if shown else self.name

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Call the function."""
        self.function(edit, context, **self.options)


@overload
def pass_function(function: Apply, /) -> DecoratedPass: ...


@overload
def pass_function(
    *,
    requires: tuple[str, ...] = (),
    ensures: tuple[str, ...] = (),
    preserves: tuple[str, ...] = (),
    is_idempotent: bool = True,
    numerics: str = "exact",
) -> Callable[[Apply], DecoratedPass]: ...


def pass_function(function: Apply | None = None, /, **contract: Any) -> Any:
    """Make a function of a session and a context a pass; works with and without arguments.

    Args:
        function: Takes `(edit, context)`, and its options by keyword, each with a default.
        **contract: What the pass says of itself: `requires`, `ensures`, `preserves`,
            `is_idempotent`, `numerics`, as in `Pass`.

    Returns:
        The pass; with a contract, the decorator that makes it.

    Example:
        >>> import torch, fxkit
        >>> from fxkit.passes import pass_function
        >>> @pass_function
        ... def drop_contiguous(edit, context):
        ...     for found in fxkit.graph(edit.gm).find(torch.Tensor.contiguous):
        ...         node = found.fx_node
        ...         if found.producers[0].type == found.type:
        ...             edit.replace(node, node.args[0])
        >>> gm = fxkit.symbolic_trace(lambda x: x.contiguous() + 1)
        >>> fxkit.PassManager([drop_contiguous], args=(torch.ones(2),)).run(gm).modified
        True
    """
    if function is not None:
        return DecoratedPass(function, Contract())
    return lambda wrapped: DecoratedPass(wrapped, Contract(**contract))


@dataclass(frozen=True)
class FunctionPass(Pass):
    """A function of a `GraphModule` as a pass, such as one written for torch.fx.

    It is given a copy of the graph, so that it may raise half-way; the modules and parameters are
    the user's own. Its own claim to have modified the graph is not asked for.

    Attributes:
        function: Takes a `GraphModule`, changes it in place or returns another, or another graph
            for it; what else it returns is ignored, but for a `PassResult` of torch.fx.
    """

    function: Callable[[fx.GraphModule], Any]

    numerics = "close"
    is_idempotent = False

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """The function's name."""
        return _name_of(self.function)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Run the function on a copy of the graph, and adopt it when it is another graph now."""
        trial = copy_graph_module(edit.gm)
        returned = self.function(trial)
        returned = getattr(returned, "graph_module", returned)
        if isinstance(returned, fx.Graph):
            returned = fx.GraphModule(trial, returned)
        result = returned if isinstance(returned, fx.GraphModule) else trial
        names = _register_other_attributes(edit, result)
        if names or not _is_same_graph(edit.graph, result.graph):
            edit.adopt(result)
            return
        for ours, theirs in zip(edit.graph.nodes, result.graph.nodes, strict=True):
            ours.meta.update(theirs.meta)


def _register_other_attributes(edit: EditSession, result: fx.GraphModule) -> dict[str, str]:
    """Give what the function put in place of an attribute a name of its own; return old → new."""
    names: dict[str, str] = {}
    for node in result.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        path = str(node.target)
        theirs, ours = find_attribute(result, path), find_attribute(edit.gm, path)
        if theirs is ours:
            continue
        if path not in names:
            names[path] = edit.register(path, theirs)
        node.target = names[path]
    return names


def _is_same_graph(ours: fx.Graph, theirs: fx.Graph) -> bool:
    """Tell whether two graphs have equal nodes in equal order. Cost: linear in the edges."""
    if len(ours.nodes) != len(theirs.nodes):
        return False
    partner: dict[fx.Node, fx.Node] = {}
    for a, b in zip(ours.nodes, theirs.nodes, strict=True):
        if (a.op, a.name) != (b.op, b.name) or not _is_same(a.target, b.target):
            return False
        if set(a.all_input_nodes) - partner.keys():
            return False
        mine = map_arg((a.args, a.kwargs), partner.__getitem__)
        if not _is_same(mine, (b.args, b.kwargs)):
            return False
        partner[a] = b
    return True


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, (fx.Node, torch.Tensor)):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, slice):
        return _is_same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b) or bool(a != a and b != b)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def as_pass(candidate: Any) -> Pass:
    """Return a pass, or a function of a `GraphModule` as one.

    Raises:
        PassError: When it is neither.
    """
    if isinstance(candidate, Pass):
        return candidate
    if isinstance(candidate, type) and issubclass(candidate, Pass):
        raise PassError(
            f"expected a pass, got the class {candidate.__name__}",
            hint=f"write {candidate.__name__}()",
        )
    if callable(candidate):
        return FunctionPass(candidate)
    shown = f"the text {candidate!r}" if isinstance(candidate, str) else type(candidate).__name__
    raise PassError(
        f"expected a pass or a function of a GraphModule, got {shown}",
        hint=_written_as(candidate) or "derive from fxkit.passes.Pass",
    )


def _written_as(name: Any) -> str | None:
    """Say how a pass or a named order is written in Python, if text names one."""
    # Here, since they import this module, and only a mistake is told by them.
    from fxkit.passes.pass_registry import PASSES
    from fxkit.passes.pipelines import PIPELINES

    if not isinstance(name, str):
        return None
    if name in PIPELINES:
        return f"write *fxkit.passes.pipelines.PIPELINES[{name!r}]"
    return f"write fxkit.passes.{PASSES[name].__name__}()" if name in PASSES else None
