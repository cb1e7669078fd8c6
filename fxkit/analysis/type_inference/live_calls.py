"""The nodes of a sweep that run on live tensors: fake ones that keep their memory and history."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.type_inference import type_errors
from fxkit.analysis.type_inference.declared_types import declared_type_of_call
from fxkit.analysis.type_inference.fake_calls import FakeCalls, filled
from fxkit.analysis.type_inference.fake_tensors import entered, is_about_data
from fxkit.analysis.type_inference.passive_numbers import ANY_NUMBER, passive_numbers
from fxkit.analysis.type_inference.symbolic_shapes import SymbolicShapes
from fxkit.analysis.type_inference.type_facts import FactTable, concrete, materialise, types_of
from fxkit.analysis.type_inference.type_keys import is_address
from fxkit.analysis.type_inference.type_observations import Observations, is_foreign
from fxkit.analysis.type_inference.type_records import NeedsLive
from fxkit.errors import FxkitError
from fxkit.ir.symbols import Symbol
from fxkit.torch_adapters.fx_nodes import input_nodes_of


class LiveCalls:
    """Runs calls on live tensors, and says why one can't run.

    Args:
        fakes: Runs calls.
        table: The facts.
        values: For each node visited what is known of its value.
        origins: Name of a symbol → the node that found it in the data.
        observed: What was known before, for calls that can't run on fake tensors.
        symbolic: Symbolic sizes, if there are any, or if data decide some.

    Attributes:
        results: The live values, by node.
    """

    def __init__(
        self,
        fakes: FakeCalls,
        table: FactTable,
        values: dict[fx.Node, Any],
        origins: dict[str, fx.Node],
        observed: Observations,
        symbolic: SymbolicShapes | None,
    ) -> None:
        self.results: dict[fx.Node, Any] = {}
        self._fakes = fakes
        self._table = table
        self._values = values
        self._origins = origins
        self._observed = observed
        self._symbolic = symbolic

    def refresh(self, node: fx.Node) -> None:
        """Look again at operands whose own metadata a write may have changed."""
        for operand in input_nodes_of(node):
            if operand in self.results:
                self._values[operand] = self._table.abstract(self.results[operand])

    def keep(self, node: fx.Node, result: Any) -> Any:
        """Keep the live value of a node; return what is known of it."""
        self.results[node] = result
        return self._table.abstract(result)

    def returned(self, output: fx.Node) -> Any:
        """Return what is known of what the graph returns."""
        value: Any = output.args[0]
        return map_arg(value, self.current)

    def current(self, node: fx.Node) -> Any:
        """Return what is known of a value by now."""
        if node in self.results:
            return self._table.abstract(self.results[node])
        return self._values[node]

    def call(self, node: fx.Node) -> Any:
        """Run a call, on fresh tensors for the operands that are not live.

        Raises:
            NeedsLive: When data decide its result.
            FxkitError: When it can't run on such operands.
        """
        if is_address(node):
            return self._address(node)
        fresh = dict.fromkeys(self._passive(node), ANY_NUMBER)

        def fill(operand: fx.Node) -> Any:
            if operand in fresh:
                return fresh[operand]
            if operand in self.results:
                return self.results[operand]
            fresh[operand] = concrete(self._values[operand], materialise)
            return fresh[operand]

        with entered(self._fakes.mode):
            args, kwargs = filled(node, fill)
            rule = declared_type_of_call(node, self._fakes.gm)
            if rule is not None:
                types, named = self._fakes.types_of(args), self._fakes.types_of(kwargs)
                return self._fakes.made(rule(*types, **named))
            try:
                result = self._fakes.apply(node, args, kwargs)
            except FxkitError:
                raise
            except Exception as error:
                return self._instead(node, error)
        self.check_symbolic_sizes(node)
        if self._observed.has_number_for(node, self._table.abstract(result)):
            return self._observed.number_of(node)
        return result

    def _address(self, node: fx.Node) -> Any:
        """Return the address that was read at capture, else a number that data decide."""
        number = self._observed.number_of(node)
        if number is not None:
            return number
        if self._symbolic is None:
            raise NeedsLive(node, about_data=True)
        return self._symbolic.number_of_data()

    def _passive(self, node: fx.Node) -> Iterable[fx.Node]:
        """Return the operands whose value is not known, and need not be."""
        unknown = {o for o in input_nodes_of(node) if isinstance(self._values[o], Symbol)}
        return unknown & passive_numbers(node) if unknown else ()

    def _instead(self, node: fx.Node, error: Exception) -> Any:
        """Return what stands for the result of a call that can't run on fake tensors."""
        about_data = is_about_data(error)
        number = self._observed.number_of(node) if about_data else None
        if number is not None:
            return number
        if about_data and self._symbolic is None:
            raise NeedsLive(node, about_data=True) from error
        result = self._observed.result_of(node)
        if result is None:
            raise self.misfit(node, error) from error
        then = self._observed.operands_of(node)
        now = tuple(types_of(self.current(operand)) for operand in input_nodes_of(node))
        if then == now:
            return self._fakes.made(result)
        if is_foreign(node):
            raise type_errors.observed_otherwise(node, error, then, now)
        raise self.misfit(node, error) from error

    def check_symbolic_sizes(self, node: fx.Node) -> None:
        """Refuse a call that gives a symbolic size a value.

        Raises:
            FxkitError: When it does.
        """
        fixed = None if self._symbolic is None else self._symbolic.fixed(node)
        if fixed is not None:
            raise type_errors.fixed_size(node, *fixed, self._shown_operands(node))

    def misfit(self, node: fx.Node, error: Exception) -> FxkitError:
        """Return the error that says that a call does not take its operands."""
        return type_errors.misfit(node, error, self._shown_operands(node), self._origins)

    def _shown_operands(self, node: fx.Node) -> str:
        known = ((o, types_of(self.current(o))) for o in input_nodes_of(node))
        return type_errors.show_operands(known)
