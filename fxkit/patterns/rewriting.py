"""A rule: what to look for, what to put in its place, and when.

@rule
def double_negation(x):
    \"\"\"Two negations cancel.

    Rewrites:
        -(-x)  →  x
    \"\"\"
    return -(-x), x
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxkit.errors import PatternError
from fxkit.ir.printer import format_node, format_source
from fxkit.patterns.language import Operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.pattern_nodes import Capture, Pattern
from fxkit.patterns.replacement import Template
from fxkit.patterns.templates import PatternBuilder, output_values, pattern, trace_template

Where = Callable[[Match], "bool | str"]


@dataclass(frozen=True, eq=False)
class Rule:
    """A rewrite rule; make one with `rule`.

    Attributes:
        name: What reports call it.
        pattern: What to look for.
        template: What to put in its place, or a function that builds it by hand.
        where: Predicate over the match: True, or False or a text that says why not.
        may_escape: Names (`named`) of interior values that others may use too; they are kept then.
        commute: Whether operands of commutative operators match in both orders.
        benefit: Of two rules that match at a node, the one with the larger benefit is taken.
        exact: Whether the replacement gives the very same numbers, and not just as good ones.
        finite_only: Whether it may differ where an operand is NaN or infinite.
        samples: Capture → example operands, for `fxkit.testing.prove`: a shape, or a constant.
        file: Where it was defined.
        doc: Its docstring.
        at: Names of the operators that the root can be, where the rule says them; its functions are
            then followed when `pattern` or `template` is first read.
    """

    name: str
    pattern: Pattern
    template: Template
    where: Where | None = None
    may_escape: tuple[str, ...] = ()
    commute: bool = True
    benefit: int = 1
    exact: bool = True
    finite_only: bool = False
    samples: tuple[Mapping[str, Any], ...] = ()
    file: str = ""
    doc: str = ""
    at: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def root_operators(self) -> tuple[str, ...]:
        """Names of the operators that the root can be."""
        return self.at or self.pattern.root_operators

    def __getattr__(self, name: str) -> Any:
        follow = self.__dict__.get(_FOLLOW)
        if follow is None or name not in ("pattern", "template"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        sides = follow()
        if set(sides[0].root_operators) != set(self.at):
            raise PatternError(
                f"expected {self.name} to say at={sides[0].root_operators}, got at={self.at}",
                hint="name each operator that the pattern may end in, or leave at= out",
            )
        self.__dict__.update(zip(("pattern", "template"), sides, strict=True))
        return self.__dict__[name]


# In a rule whose functions are not followed yet: does so, and returns pattern and template.
_FOLLOW = "_follow"


def rule(
    before: Callable[..., Any] | Pattern | None = None,
    after: Callable[..., Any] | None = None,
    *,
    where: Where | Mapping[str, Operand] | Sequence[Where | Mapping[str, Operand]] | None = None,
    may_escape: tuple[str, ...] = (),
    commute: bool = True,
    benefit: int = 1,
    exact: bool = True,
    finite_only: bool = False,
    samples: tuple[Mapping[str, Any], ...] = (),
    name: str | None = None,
    at: str | tuple[str, ...] = (),
) -> Any:
    """Make a rule of two functions, or decorate one function that returns both sides.

    Args:
        before: Computes what to look for. Alone: returns `(what to look for, replacement)`.
        after: Computes the replacement from parameters of the same names.
        where: Predicate over the `Match` (return a text instead of False to say why not), or
            capture → `operand(...)`, or several of both.
        may_escape: Names (`named`) of interior values that may be used outside of the match too.
        commute: Try the operands of commutative operators in both orders.
        benefit: Preference over other rules at the same node.
        exact: Set to False when the replacement may differ by rounding.
        finite_only: Set to True when it may differ where an operand is NaN or infinite.
        samples: For the proof, capture → shape or constant, for rules that need special operands.
        name: What reports call it; the function's name when left out.
        at: Name of the operator that the pattern ends in, `"aten.add"`, or of all that it may end
            in. Then the functions are not followed before a graph has one of them.

    Raises:
        PatternError: When a side can't be traced, is a bare parameter, or reads a tensor or module
            that is no parameter; when the sides do not agree in parameters or number of results;
            when the replacement returns None, or takes a parameter that the pattern does not use.
            With `at`, all this when the rule is first used.

    Example:
        >>> import torch, fxkit
        >>> gelu = fxkit.rule(
        ...     lambda x: 0.5 * x * (1 + torch.erf(x * 0.7071067811865476)),
        ...     lambda x: torch.nn.functional.gelu(x),
        ...     exact=False,
        ... )
    """
    operands, predicate = conditions_of(where)
    options: dict[str, Any] = {
        "where": predicate,
        "operands": operands,
        "may_escape": may_escape,
        "commute": commute,
        "benefit": benefit,
        "exact": exact,
        "finite_only": finite_only,
        "samples": samples,
        "at": (at,) if isinstance(at, str) else at,
    }
    if before is None:
        return lambda function: _from_one(function, name, options)
    if after is None:
        if isinstance(before, Pattern):
            raise PatternError(
                "expected a replacement beside the pattern, got none",
                hint="pass a function of the same parameters as the second argument",
            )
        return _from_one(before, name, options)
    return _from_two(before, after, name, options)


def _demands(condition: Mapping[str, Any]) -> Mapping[str, Operand]:
    for name, demand in condition.items():
        if not isinstance(demand, Operand):
            raise PatternError(
                f"expected an operand for {name!r} in where=, got {type(demand).__name__}",
                hint="write operand(value=...) for a predicate over a constant, "
                "or where=lambda match: ... over the whole match",
            )
    return condition


def check_rules(rules: Any) -> list[Rule]:
    """Return one rule, or several, as a list.

    Raises:
        PatternError: When something is no rule.
    """
    if isinstance(rules, Rule):
        return [rules]
    is_one = isinstance(rules, str) or not isinstance(rules, Iterable)
    given: list[Any] = [rules] if is_one else list(rules)
    for candidate in given:
        if not isinstance(candidate, Rule):
            raise PatternError(
                f"expected rules, got {type(candidate).__name__}",
                hint="make one with fxkit.rule(before, after)",
            )
    return given


def check_sides(found: Pattern, template: Template) -> None:
    """Refuse a replacement that can't take the place of what its pattern matches.

    Raises:
        PatternError: When it has another number of results, or None for one, takes a parameter that
            stands nowhere in the pattern, or reads a tensor or a module that is no parameter.
    """
    if any(value is None for value in template.values):
        raise PatternError(
            f"expected a replacement for each result of {found.name}, got None",
            hint="write return in front of what the replacement computes",
        )
    if len(template.values) != len(found.outputs):
        raise PatternError(
            f"expected as many results as the pattern has, {len(found.outputs)}, "
            f"got {len(template.values)}",
            hint="return one replacement for each value that the pattern returns",
        )
    taken = [str(node.target) for node in template.graph.nodes if node in template.inputs]
    unbound = [name for name in taken if name in found.captures and name not in found.bound]
    if unbound:
        raise PatternError(
            f"expected a replacement of parameters that the pattern {found.name} computes with, "
            f"got {', '.join(unbound)}",
            hint="use it in the pattern, or take it out of the replacement",
        )
    own = next((node for node in template.body if node.op in ("get_attr", "call_module")), None)
    if own is not None:
        raise PatternError(
            f"expected a replacement of operations on its parameters, got {own.op} {own.target!r}",
            node=format_node(own),
            source=format_source(own),
            hint="pass tensors that the pattern binds as parameters, write functions for modules, "
            "as F.linear; for new weights use fxkit.find and edit.add_attribute",
        )


def objection_of(verdict: Any) -> str | None:
    """Return why a predicate refuses, by what it answered, or None when it does not.

    As in Python, what is true accepts and what is not refuses; a text is the reason of a refusal.
    """
    if isinstance(verdict, str):
        return verdict or "the rule's predicate says no"
    if verdict is None:
        return "the rule's predicate returned None, which is no yes"
    return None if verdict else "the rule's predicate says no"


def conditions_of(where: Any) -> tuple[dict[str, Operand], Where | None]:
    """Divide what `where=` was given into demands on captures and one predicate."""
    given: Sequence[Any] = (
        where if isinstance(where, (list, tuple)) else ([] if where is None else [where])
    )
    operands: dict[str, Operand] = {}
    predicates: list[Any] = []
    for condition in given:
        if isinstance(condition, Mapping):
            operands.update(_demands(condition))
        elif callable(condition):
            predicates.append(condition)
        else:
            raise PatternError(
                f"expected a predicate, or demands on captures, in where=, got {condition!r}",
                hint="a predicate takes the match; demands are {'x': operand(rank=2)}",
            )
    if len(predicates) < 2:
        return operands, predicates[0] if predicates else None

    def all_of(match: Match) -> bool | str:
        reasons = (objection_of(predicate(match)) for predicate in predicates)
        return next((reason for reason in reasons if reason is not None), True)

    return operands, all_of


def _from_one(function: Callable[..., Any], name: str | None, options: dict[str, Any]) -> Rule:
    operands = options.pop("operands")
    shown: str = name or getattr(function, "__name__", type(function).__name__)
    return _made(shown, function, lambda: _sides_of_one(function, shown, operands), options)


def _sides_of_one(
    function: Callable[..., Any], name: str, operands: Mapping[str, Operand]
) -> tuple[Pattern, Template]:
    graph = trace_template(function)
    sides = output_values(graph)
    if len(sides) != 2:
        raise PatternError(
            f"expected a rule function to return (before, after), got {len(sides)} value(s)",
            hint="return both sides, or call rule(pattern_fn, replacement_fn)",
        )
    wanted = sides[0] if isinstance(sides[0], (tuple, list)) else (sides[0],)
    values = sides[1] if isinstance(sides[1], (tuple, list)) else (sides[1],)
    builder = PatternBuilder(graph)
    outputs = builder.outputs(tuple(wanted))
    found = Pattern(outputs, tuple(builder.captures), name, operands)
    reuses = {n: p for n, p in builder.nodes.items() if not isinstance(p, Capture)}
    return found, Template(graph, tuple(values), reuses)


def _from_two(
    before: Callable[..., Any] | Pattern,
    after: Callable[..., Any],
    name: str | None,
    options: dict[str, Any],
) -> Rule:
    operands = options.pop("operands")
    own = before.name if isinstance(before, Pattern) else getattr(before, "__name__", "pattern")
    wished = name or own
    if wished == "<lambda>":
        wished = f"to_{getattr(after, '__name__', 'replacement')}".replace(
            "<lambda>", "replacement"
        )
    return _made(wished, after, lambda: _sides_of_two(before, after, wished, operands), options)


def _sides_of_two(
    before: Callable[..., Any] | Pattern,
    after: Callable[..., Any],
    name: str,
    operands: Mapping[str, Operand],
) -> tuple[Pattern, Template]:
    found = pattern(before, operands)
    graph = trace_template(after)
    parameters = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
    unknown = [p for p in parameters if p not in found.captures]
    if unknown:
        raise PatternError(
            f"expected the replacement's parameters among {', '.join(found.captures)}, "
            f"got {', '.join(unknown)}",
            hint="give both functions parameters of the same names",
        )
    return replace(found, name=name), Template(graph, output_values(graph))


def _made(
    name: str,
    function: Callable[..., Any],
    follow: Callable[[], tuple[Pattern, Template]],
    options: dict[str, Any],
) -> Rule:
    """Make a rule, of functions that are followed now or, when it says where it matches, later."""

    def checked() -> tuple[Pattern, Template]:
        found, template = follow()
        check_sides(found, template)
        unnamed = [n for n in options["may_escape"] if n not in found.named | found.bound]
        if unnamed:
            shown = ", ".join(map(repr, unnamed))
            raise PatternError(
                f"expected may_escape to name values of {name}, got {shown}",
                hint="write named(value, 'name') in the pattern, and may_escape=('name',)",
            )
        return found, template

    code = inspect.unwrap(function)
    is_python = inspect.isfunction(code) or inspect.ismethod(code)
    file = (inspect.getsourcefile(code) if is_python else None) or ""
    doc = inspect.getdoc(function) or ""
    if not options["at"]:
        return Rule(name, *checked(), file=file, doc=doc, **options)
    later = object.__new__(Rule)
    later.__dict__.update(name=name, file=file, doc=doc, **options)
    later.__dict__[_FOLLOW] = checked
    return later
