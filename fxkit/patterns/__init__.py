"""Find patterns in graphs and rewrite them by rules.

Beside plain operators a pattern may say `any_of`, `optional`, `repeated` and `named`, and `operand`
says what a captured operand has to be; a replacement may use constants that are `computed`; see
`fxkit.patterns.language`.
"""

from __future__ import annotations

from fxkit.patterns.language import any_of, computed, named, operand, optional, repeated
from fxkit.patterns.pattern_nodes import Pattern
from fxkit.patterns.templates import pattern

__all__ = ["Pattern", "any_of", "computed", "named", "operand", "optional", "pattern", "repeated"]
