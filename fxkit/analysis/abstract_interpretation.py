"""Abstract interpretation: a value for each node of a graph, by a transfer function an operator."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.effects import effects_of
from fxkit.analysis.objects import Given, GraphNode
from fxkit.errors import UnsupportedError
from fxkit.ir.attributes import Attribute, find_attribute
from fxkit.ir.call import Call
from fxkit.ir.op import operator_name, resolve
from fxkit.ir.printer import format_node
from fxkit.ir.provenance import source_of

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

_OPERATORS = "_fxkit_transfers"


def transfer(*operators: Any) -> Callable[[Method], Method]:
    """Make a method of an `Analysis` the transfer function of some operators.

    Args:
        operators: Each in any spelling: `torch.relu`, `F.relu`, `nn.ReLU`, `"aten.relu"`.
    """

    def decorate(method: Method) -> Method:
        setattr(method, _OPERATORS, tuple(operator_name(operator) for operator in operators))
        return method

    return decorate


class Analysis(ABC, Generic[T]):
    """A value for each node, computed in graph order by one transfer function an operator.

    A subclass says what the value of an input is and, in methods under `@transfer`, what operators
    make of the values of their operands. A transfer function takes the node, then the arguments in
    the order of the operator's schema as far as it has positional parameters, the others by name
    where it has keyword-only ones; in each, nodes are replaced by their values. What has no
    transfer function gets `otherwise`. An element of a value that is a tuple or a list is taken by
    itself. In a pass, `context.analysis(MyAnalysis)` keeps the result until the graph changes.

    Values are those of results: a graph that writes to memory is refused, unless `ignores_writes`.

    Args:
        subject: A graph module, or its graph.

    Attributes:
        ignores_writes: Whether graphs are taken whose nodes write to memory.
        values: The value of each node.

    Raises:
        UnsupportedError: The graph writes to memory; `Functionalise` takes writes out.

    Example:
        >>> import torch, fxkit
        >>> class Depth(fxkit.Analysis[int]):
        ...     "How many matrix products lie on the longest way to a node."
        ...     def input(self, node):
        ...         return 0
        ...     def otherwise(self, node, operands):
        ...         return max(operands, default=0)
        ...     @fxkit.transfer(torch.nn.functional.linear, torch.matmul)
        ...     def product(self, node, a, b):
        ...         return max(a, b) + 1
        >>> net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
        >>> depth = Depth(fxkit.symbolic_trace(net))
        >>> depth["_2"], depth.result
        (3, 3)
    """

    ignores_writes: ClassVar[bool] = False
    _transfers: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {
            operator: name
            for name, method in vars(cls).items()
            for operator in getattr(method, _OPERATORS, ())
        }
        cls._transfers = {**cls._transfers, **own}

    def __init__(self, subject: fx.GraphModule | fx.Graph) -> None:
        self.graph = subject.graph if isinstance(subject, fx.GraphModule) else subject
        if not isinstance(self.graph, fx.Graph):
            raise UnsupportedError(
                f"expected a torch.fx.GraphModule or its graph, got {type(subject).__name__}",
                hint="make one with fxkit.capture(fn, args).graph_module",
            )
        self.values: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            self.values[node] = self._value(node)

    @abstractmethod
    def input(self, node: fx.Node) -> T:
        """Return the value of an input of the graph."""

    def attribute(self, node: fx.Node, held: Any) -> T:
        """Return the value of a parameter, buffer or constant; that of an input when left out.

        Args:
            node: The node that reads it, or the call of the module that holds it.
            held: What the module holds.
        """
        return self.input(node)

    @abstractmethod
    def otherwise(self, node: fx.Node, operands: list[T]) -> T:
        """Return the value of a call that has no transfer function.

        Args:
            node: The call.
            operands: The values of its operands, in the order of its arguments.
        """

    @property
    def result(self) -> Any:
        """What the graph returns, with values in the place of nodes."""
        return self.values[self.graph.output_node()]

    def __getitem__(self, node: Given) -> Any:
        """Return the value of a node, given as an object, a `torch.fx.Node` or by its name."""
        if isinstance(node, str):
            node = next(known for known in self.values if known.name == node)
        return self.values[node.fx_node if isinstance(node, GraphNode) else node]

    def _value(self, node: fx.Node) -> Any:
        try:
            if node.op == "placeholder":
                return self.input(node)
            if node.op == "get_attr":
                return self._attribute(node, str(node.target))
            if node.op == "output":
                return map_arg(node.args[0], self.values.__getitem__)
            return self._call(node)
        except Exception as error:
            error.add_note(f"  node:  {format_node(node)}\n  from:  {source_of(node)}")
            raise

    def _attribute(self, node: fx.Node, path: str) -> T:
        return self.attribute(node, find_attribute(self.graph.owning_module, path))

    def _call(self, node: fx.Node) -> Any:
        call = resolve(node)
        if call is None:
            return self.otherwise(node, [self.values[operand] for operand in node.all_input_nodes])
        self._check_writes(node)
        arguments = {name: self._operand(node, value) for name, value in call.arguments.items()}
        if call.name in self._transfers:
            method = getattr(self, self._transfers[call.name])
            positional, by_name = _bound(method.__func__, call, arguments)
            return method(node, *positional, **by_name)
        if call.name == "python.getitem":
            whole, place = list(arguments.values())[:2]
            if isinstance(whole, (tuple, list)):
                return whole[place]
        operands = [self._operand(node, value) for value in _operands(call.arguments.values())]
        return self.otherwise(node, operands)

    def _operand(self, node: fx.Node, value: Any) -> Any:
        """Return an argument with values in the place of nodes and attributes."""
        if isinstance(value, Attribute):
            return self._attribute(node, value.path)
        if isinstance(value, (list, tuple)):
            return type(value)(self._operand(node, item) for item in value)
        return self.values[value] if isinstance(value, fx.Node) else value

    def _check_writes(self, node: fx.Node) -> None:
        effects = effects_of(node)
        if effects.writes and not self.ignores_writes:
            raise UnsupportedError(
                f"expected a graph that writes to no memory, got %{node.name}: "
                f"{effects.describe()}",
                hint="run fxkit.passes.Functionalise() first, or set ignores_writes on the class",
            )


def _operands(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes and attributes among arguments, those in lists too."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _operands(value)
        elif isinstance(value, (fx.Node, Attribute)):
            yield value


def _bound(
    method: Callable[..., Any], call: Call, arguments: Mapping[str, Any]
) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the arguments of a transfer function: those by position, and those by name."""
    count, names, takes_all = _parameters(method)
    in_order = list(arguments)
    rest = {name: arguments[name] for name in in_order[count:]}
    by_name = rest if takes_all else {n: arguments[n] for n in names if n in arguments}
    return [arguments[name] for name in in_order[:count]], by_name


@functools.cache
def _parameters(method: Callable[..., Any]) -> tuple[int, tuple[str, ...], bool]:
    """Return how many operands a transfer function takes by position, and which by name."""
    parameters = list(inspect.signature(method).parameters.values())[2:]
    kinds = [parameter.kind for parameter in parameters]
    count = sum(kind in (_PLACED, _PLACED_ONLY) for kind in kinds)
    count = len(parameters) + 64 if inspect.Parameter.VAR_POSITIONAL in kinds else count
    names = tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)
    return count, names, inspect.Parameter.VAR_KEYWORD in kinds


_PLACED = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PLACED_ONLY = inspect.Parameter.POSITIONAL_ONLY
