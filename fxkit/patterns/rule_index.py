"""Rules by the operator of their root, so that a rule costs nothing at nodes of other operators."""

from __future__ import annotations

import functools

from torch import fx

from fxkit.ir.op import operator_of
from fxkit.patterns.rewriting import Rule
from fxkit.torch_adapters.fx_nodes import input_nodes_of


class RuleLevel:
    """The rules of one root operator and one benefit, by what an operand of the root must be."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []  # in order of preference

    @functools.cached_property
    def _places(self) -> tuple[list[int], dict[str, list[int]]]:
        """The rules that match anywhere, and those by what must have computed an operand."""
        anywhere: list[int] = []
        by_operand: dict[str, list[int]] = {}
        for number, candidate in enumerate(self.rules):
            operators = candidate.pattern.operand_operators
            for operator in operators:
                by_operand.setdefault(operator, []).append(number)
            if not operators:
                anywhere.append(number)
        return anywhere, by_operand

    @functools.cached_property
    def depth(self) -> int:
        """How many operations stand above one another at most in a pattern of the rules."""
        return max(candidate.pattern.depth for candidate in self.rules)

    def candidates(self, node: fx.Node) -> list[Rule]:
        """Return the rules that may match at a node, in order. Cost: linear in its operands."""
        anywhere, by_operand = self._places
        if not by_operand:
            return self.rules
        found = set(anywhere)
        for operand in input_nodes_of(node):
            operator = operator_of(operand)
            if operator is not None:
                found.update(by_operand.get(operator.name, ()))
        return [self.rules[position] for position in sorted(found)]


@functools.lru_cache(maxsize=16)
def by_root_and_benefit(rules: tuple[Rule, ...]) -> dict[str, list[tuple[int, RuleLevel]]]:
    """Return root operator → benefit → rules in order, the largest benefit first."""
    found: dict[str, dict[int, RuleLevel]] = {}
    for candidate in rules:
        for operator in candidate.root_operators:
            levels = found.setdefault(operator, {})
            level = levels.get(candidate.benefit)
            if level is None:
                level = levels[candidate.benefit] = RuleLevel()
            level.rules.append(candidate)
    return {
        operator: sorted(levels.items(), key=lambda level: -level[0])
        for operator, levels in found.items()
    }
