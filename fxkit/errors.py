"""The errors that fxkit raises, and the one form that their messages have.

Each message says what was expected and what was there instead, then, as far as they are known, the
node, the user's source line, the pass, one thing to do, and a runnable reproducer::

    expected two operands of the same dtype, got f32[2, 3] and i64[2, 3]
      node:  %add_3: f32[2,3] = add(%x: f32[2,3], %y: i64[2,3])
      from:  model.py:41 in forward
      pass:  canonicalise (3/7)
      hint:  cast one operand with .to(torch.float32)
"""

from __future__ import annotations


class FxkitError(Exception):
    """Base of every error that fxkit raises on purpose.

    Args:
        message: What was expected and what was there instead, one line if it can be.
        node: The node at fault, as text (`fxkit.ir.printer.format_node`).
        source: The user's source line, `file:line in function`.
        in_pass: The pass that was running, with its position if it is known.
        hint: One thing to do.
        repro: The path of a file that reproduces the failure when it is run.
    """

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        source: str | None = None,
        in_pass: str | None = None,
        hint: str | None = None,
        repro: str | None = None,
    ) -> None:
        self.message = message
        self.node = node
        self.source = source
        self.in_pass = in_pass
        self.hint = hint
        self.repro = repro
        super().__init__(message)

    def __str__(self) -> str:
        lines = [f"  {label + ':':<6} {text}" for label, text in self._details() if text]
        return "\n".join([self.message, *lines])

    def _details(self) -> list[tuple[str, str | None]]:
        """Return what is told below the message, each under its label."""
        return [
            ("node", self.node),
            ("from", self.source),
            ("pass", self.in_pass),
            ("hint", self.hint),
            ("repro", self.repro),
        ]


class CaptureError(FxkitError):
    """A program could not be turned into a graph, or a captured graph does not fit a call."""


class InvalidGraphError(FxkitError):
    """A graph breaks an invariant that `fxkit.ir.verifier.verify` checks."""


class PatternError(FxkitError):
    """A pattern or a rule is malformed; a mere mismatch is a value, not an error."""


class RewriteError(FxkitError):
    """A rewrite or an edit session could not be carried out; the graph is as it was before.

    Args:
        message: What was expected and what was there instead.
        rule: The name of the rule that failed.
        **details: What every error takes: `node`, `source`, `in_pass`, `hint`, `repro`.
    """

    def __init__(self, message: str, *, rule: str | None = None, **details: str | None) -> None:
        super().__init__(message, **details)
        self.rule = rule


class PassError(FxkitError):
    """A pass failed; the graph is as it was before that pass.

    Args:
        message: What was expected and what was there instead.
        rule: The rule or pass that was rewriting.
        site: Names of the nodes that it was rewriting, in graph order.
        **details: What every error takes: `node`, `source`, `in_pass`, `hint`, `repro`.
    """

    def __init__(
        self,
        message: str,
        *,
        rule: str | None = None,
        site: tuple[str, ...] = (),
        **details: str | None,
    ) -> None:
        super().__init__(message, **details)
        self.rule = rule
        self.site = site

    def _details(self) -> list[tuple[str, str | None]]:
        details = super()._details()
        if self.rule is not None:
            at = ", ".join(f"%{name}" for name in self.site)
            place = details.index(("hint", self.hint))
            details.insert(place, ("rule", f"{self.rule}{f' at {at}' if at else ''}"))
        return details


class PreconditionError(PassError):
    """What a pass requires of the graph did not hold before it ran."""


class PostconditionError(PassError):
    """What a pass promises of the graph did not hold after it ran."""


class UnsupportedError(FxkitError):
    """What was asked for is outside what fxkit does; the hint says what to use instead."""


class BuildError(FxkitError):
    """A C++ or CUDA compiler was not found, failed, or produced something that does not load.

    Args:
        message: What failed, with the compiler's first error.
        command: The compiler command that was run, if any.
        log: The path of the file that holds the compiler's whole output, if any.
        library: The path of what was built and does not load, if that is so.
    """

    def __init__(
        self,
        message: str,
        *,
        command: str | None = None,
        log: str | None = None,
        library: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.command = command
        self.log = log
        self.library = library

    @property
    def is_of_text(self) -> bool:
        """Whether other texts may be built all the same: a compiler was there, and it ran."""
        return self.log is not None or self.library is not None

    def _details(self) -> list[tuple[str, str | None]]:
        details = super()._details()
        return [*details, ("command", self.command), ("log", self.log), ("file", self.library)]


class NumericsError(FxkitError):
    """Two programs that have to agree differ in value, shape, dtype, stride or gradient."""


class CounterexampleError(NumericsError):
    """A rule changes what a program does; the smallest program found that shows it.

    Args:
        message: How the results differ.
        code: A script that makes the program and its inputs, rewrites it and compares.
        node: The program, as text.
        source: The rule's file.
        hint: The inputs.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        node: str | None = None,
        source: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, node=node, source=source, hint=hint)
        self.code = code

    def __str__(self) -> str:
        indented = "\n".join(f"    {line}".rstrip() for line in self.code.splitlines())
        return f"{super().__str__()}\n  code:\n{indented}"
