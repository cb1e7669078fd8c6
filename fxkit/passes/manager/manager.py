"""Run passes in order, check each, and tell what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from fxkit.errors import PassError
from fxkit.passes.base import Pass
from fxkit.passes.manager.contracts import check_words
from fxkit.passes.manager.execution import Execution
from fxkit.passes.manager.groups import Group, items_of, leaves
from fxkit.passes.manager.instruments import DumpOnChange, Instrument, PrintAfter
from fxkit.passes.manager.records import PassRecord, PassResult
from fxkit.passes.pass_registry import PASSES
from fxkit.passes.subjects import Subject

if TYPE_CHECKING:
    from fxkit.passes.manager.bisection import Bisection

__all__ = ["VERIFY_LEVELS", "PassManager", "PassRecord", "PassResult"]

VERIFY_LEVELS = ("off", "structure", "each", "numerics")


class PassManager:
    """Runs passes over a graph: each wholly or not at all, each checked.

    What a pass requires and what does not hold yet is seen to by running the pass that ensures it.
    What it says of itself is checked, as far as `verify` asks for it.

    Args:
        passes: The passes, in order: passes, groups, lists of passes, other managers. A function
            that takes a `GraphModule`, such as one written for torch.fx, is a pass too.
        verify: `off`; `structure`: the graph's invariants after each pass; `each` (default): also
            that the types of the outputs stayed, when `args` are given, that the properties hold
            that the pass ensures and preserves, and that it changes nothing when run again, if it
            says so; `numerics`: also that outputs, argument mutation and gradients stayed, within
            twice the error of the graph before against float64, or exactly where the pass says so.
        args: Example inputs: their types are propagated before the first pass. For `numerics` they
            are made from the types of the placeholders when left out.
        kwargs: Example keyword inputs.
        instruments: What is told of each pass.
        print_after: Write the graph to standard output: True for after each pass that changed it,
            or the names of passes.
        dump_on_change: A folder: a file for each pass that changed the graph.
        max_seconds: How long one pass may take.
        max_nodes: How many nodes the graph may get; ten times as many as it has, and 10,000, when
            left out.
        reproduce: A folder: when a pass fails, a script that runs it alone is written there.
        on_failure: Asked with a pass that failed and the error, when the graph is as it was before
            the pass. If it answers True, the run goes on without the pass; when it was a rule that
            failed, the pass runs again without that rule, if it applies its rules by
            `context.rewrite`. When it is left out, the error is raised.

    Raises:
        PassError: When it is given something that is no pass, an unknown level, inputs that are no
            tuple, or a pass that names a property that does not exist.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x: torch.relu(torch.relu(x * 1)))
        >>> pm = fxkit.PassManager([fxkit.passes.Canonicalise()], args=(torch.randn(2, 3),))
        >>> pm.run(gm).records[0].rewrites
        Counter({'multiply_by_one': 1, 'relu_of_relu': 1})
    """

    def __init__(
        self,
        passes: Iterable[Pass | Group | Callable[[fx.GraphModule], Any] | Any],
        *,
        verify: str = "each",
        args: tuple[Any, ...] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        instruments: Iterable[Instrument] = (),
        print_after: bool | Iterable[str] = False,
        dump_on_change: str | Path | None = None,
        max_seconds: float | None = 600.0,
        max_nodes: int | None = None,
        reproduce: str | Path | None = None,
        on_failure: Callable[[Pass, PassError], bool] | None = None,
    ) -> None:
        if verify not in VERIFY_LEVELS:
            raise PassError(
                f"expected verify to be one of {', '.join(VERIFY_LEVELS)}, got {verify!r}",
                hint="leave it out to get 'each'",
            )
        _check_limits(max_seconds, max_nodes)
        watching = checked_instruments(instruments)
        check_passes(passes)
        _check_given(args, kwargs)
        for name, folder in (("dump_on_change", dump_on_change), ("reproduce", reproduce)):
            _check_folder(name, folder)
        self.items = items_of(tuple(passes))
        for current in self.passes:
            check_words(current)
        self._check_names(print_after)
        self.verify = verify
        self.args = args
        self.kwargs = dict(kwargs or {})
        self.instruments = [*watching, *_printing(print_after, dump_on_change)]
        self.max_seconds = max_seconds
        self.max_nodes = max_nodes
        self.reproduce = reproduce
        self.on_failure = on_failure

    def _check_names(self, names: Any) -> None:
        if isinstance(names, bool):
            return
        known = {current.name for current in self.passes}
        for name in [names] if isinstance(names, str) else names:
            if name not in known and not _is_registered(name):
                raise PassError(
                    f"expected print_after to name passes, got {name!r}",
                    hint=f"those of this list are {', '.join(sorted(known)) or 'none'}",
                )

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, those of groups where their group stands."""
        return tuple(leaves(self.items))

    def run(
        self, program: Any, *, stop_after: int | None = None, max_rewrites: int | None = None
    ) -> PassResult:
        """Run all passes over a module, in place.

        Args:
            program: A `GraphModule`; a captured program, of which the graph that ran last is
                changed, and graphs that it captures from then on before they run; or an
                `ExportedProgram`, which stays as it is: `result.graph_module` is a module made of
                it, `result.exported_program()` a program made of that.
            stop_after: Run only so many passes of the list.
            max_rewrites: Make only so many rewrites in all, then stop: for bisecting;
                `FXKIT_MAX_REWRITES` when left out.

        Returns:
            The module, with a record of what each pass did.

        Raises:
            PreconditionError: When a pass requires what does not hold, and no pass ensures it.
            PassError: When a pass raises or does not come to an end; the graph is as it was before
                that pass.
            PostconditionError: When a pass broke the graph, its types, its numbers, or what it says
                of itself; the graph is as it was before that pass.
        """
        _check_count("stop_after", stop_after)
        _check_count("max_rewrites", max_rewrites)
        subject = Subject.of(program, self.args, self.kwargs)
        return Execution(self, subject, stop_after, max_rewrites).run()

    def again(
        self,
        gm: fx.GraphModule,
        args: tuple[Any, ...] | None,
        stop_after: int | None,
        max_rewrites: int | None,
    ) -> PassResult:
        """Run the passes on another graph of a program that they have run on already.

        Nobody is told of it, and of what passes say of themselves nothing is checked.

        Args:
            gm: The graph.
            args: Inputs of it; None where it serves inputs of more than one kind.
            stop_after: As `run` takes it.
            max_rewrites: As `run` takes it.
        """
        level = "off" if self.verify == "off" else "structure"
        twin = PassManager(
            self.items,
            verify=level,
            args=args,
            max_seconds=self.max_seconds,
            max_nodes=self.max_nodes,
        )
        return twin.run(gm, stop_after=stop_after, max_rewrites=max_rewrites)

    def bisect(
        self,
        program: Any,
        bad: Callable[[fx.GraphModule, tuple[Any, ...]], Any],
        *,
        folder: str | Path | None = None,
    ) -> Bisection:
        """Find the rewrite that broke a program, minify the program, and write a script.

        The passes run once; then the oracle is asked of the graph after some of the passes, and
        after some of the rewrites, or single changes, of one of them: about log2 of their numbers.
        After the first of these at which it says bad, before and after are compared in values,
        strides, writes and gradients, else by the oracle, to minify what the pass breaks.

        Args:
            program: As `run` takes it; it is not changed.
            bad: `bad(gm, args)` is True when the fault is there. It gets copies of a module that
                takes one argument for each placeholder, and of the manager's inputs as such.
            folder: Where to write the reproducer; a new temporary folder when left out.

        Returns:
            The pass, rule and site, the graphs around it, the small program and its script.

        Raises:
            NumericsError: When the oracle says bad of the program as it was given, or good of it
                after all passes, or raises.
            PassError: When a pass fails.
        """
        # Imported where a fault is looked for: some 180 modules that few runs need.
        from fxkit.passes.manager.bisection import find_fault

        return find_fault(self, program, bad, folder)

    def __repr__(self) -> str:
        return f"PassManager([{', '.join(map(str, self.items))}], verify={self.verify!r})"


def _is_registered(name: Any) -> bool:
    """Tell whether there is such a pass, which may be run for what another one requires."""
    return name in PASSES


def _check_count(name: str, count: Any) -> None:
    if count is not None and (not isinstance(count, int) or count < 0):
        raise PassError(f"expected {name} to be a number from 0 on, got {count!r}")


def _check_limits(max_seconds: Any, max_nodes: Any) -> None:
    is_time = isinstance(max_seconds, (int, float)) and max_seconds >= 0
    if max_seconds is not None and not is_time:
        raise PassError(
            f"expected max_seconds to be a number from 0 on, got {max_seconds!r}",
            hint="None lets a pass take any time",
        )
    if max_nodes is not None and not (isinstance(max_nodes, int) and max_nodes > 0):
        raise PassError(
            f"expected max_nodes to be a count from 1 on, got {max_nodes!r}",
            hint="None bounds the nodes by those that the graph has",
        )


def _check_folder(name: str, folder: Any) -> None:
    if folder is not None and not isinstance(folder, (str, Path)):
        raise PassError(
            f"expected {name} to be a folder, got {type(folder).__name__}",
            hint="give its path, as text or a pathlib.Path",
        )


def check_passes(passes: Any) -> None:
    """Refuse what is no list of passes, such as a single one.

    Raises:
        PassError: When it is something else, with how to write a list of it.
    """
    if isinstance(passes, (Pass, Group, str)) or not isinstance(passes, Iterable):
        raise PassError(
            f"expected a list of passes, got {type(passes).__name__}",
            hint=f"write [{passes}]"
            if isinstance(passes, (Pass, Group, PassManager))
            else "write [...] around a single pass too",
        )


def _check_given(args: Any, kwargs: Any) -> None:
    if args is not None and not isinstance(args, (tuple, list)):
        raise PassError(
            f"expected a tuple of example inputs, got {type(args).__name__}",
            hint="write args=(x,) for a single input",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise PassError(
            f"expected example keyword inputs by name, got {type(kwargs).__name__}",
            hint="write kwargs={'mask': mask}",
        )


def checked_instruments(instruments: Any) -> tuple[Instrument, ...]:
    """Return instruments as a tuple.

    Raises:
        PassError: When one of them is something else.
    """
    found = tuple(instruments if isinstance(instruments, Iterable) else (instruments,))
    for one in found:
        if not isinstance(one, Instrument):
            raise PassError(
                f"expected instruments, got {type(one).__name__}",
                hint="derive from fxkit.passes.Instrument",
            )
    return found


def _printing(
    print_after: bool | Iterable[str], dump_on_change: str | Path | None
) -> Iterable[Instrument]:
    if print_after is True:
        yield PrintAfter()
    elif print_after:
        yield PrintAfter(frozenset([print_after] if isinstance(print_after, str) else print_after))
    if dump_on_change is not None:
        yield DumpOnChange(Path(dump_on_change))
