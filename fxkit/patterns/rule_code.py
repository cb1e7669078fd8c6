"""Rules in scripts: where a rule at the top level of a module is imported from."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from fxkit.analysis.reproducing.module_code import ModuleWriter
from fxkit.errors import UnsupportedError
from fxkit.patterns.rewriting import Rule

# Rewrites a copy of `program`, in a script that has `args` too.
APPLY_RULE = """
import copy
import fxkit
rewritten = copy.deepcopy(program)
fxkit.propagate_types(rewritten, args)
print(fxkit.rewrite(rewritten, {rule}))
""".strip()


def rules_named(name: str) -> Iterator[Rule]:
    """Yield the rules of a name that stand at the top level of the modules that define them."""
    found = {id(rule): rule for _, _, rule in _rules() if rule.name == name}
    yield from found.values()


def rule_code(writer: ModuleWriter, wanted: Rule) -> str:
    """Return an expression for a rule, and note its import.

    Raises:
        UnsupportedError: When it does not stand at the top level of a module.
    """
    for module, attribute, rule in _rules():
        if rule is wanted:
            return f"{writer.value(sys.modules[module])}.{attribute}"
    raise UnsupportedError(
        f"expected a rule at the top level of a module, got {wanted.name}",
        hint="assign it to a name of its module",
    )


def _rules() -> Iterator[tuple[str, str, Rule]]:
    """Yield module, attribute and rule for each rule at the top level of its module."""
    for module in list(sys.modules.values()):
        is_main = getattr(module, "__name__", "__main__") == "__main__"
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is Rule and not is_main and module.__file__ == value.file:
                yield module.__name__, attribute, value
