"""The statements of a loop nest: loops, conditions, and what is computed in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch

from fxkit.errors import InvalidGraphError
from fxkit.lower.loop_ir.index_expressions import IndexExpr, IndexValue, variable

# The variables of loops over lanes, over the blocks that share a row, and over what those left.
LANE, SPLIT, PARTIAL = "l", "split", "s"


class LoopKind(Enum):
    """How the iterations of a loop run."""

    PARALLEL = "parallel"
    SERIAL = "for"
    UNROLLED = "unrolled"
    LANES = "lanes"
    BLOCK = "block"
    SPLIT = "split"
    THREAD = "thread"

    @property
    def is_parallel(self) -> bool:
        """Whether no iteration depends on another one."""
        return self not in (LoopKind.SERIAL, LoopKind.UNROLLED)


@dataclass(frozen=True)
class For:
    """Run a block for each value of a variable.

    Attributes:
        var: The variable.
        end: It stays below this.
        kind: How iterations run. Blocks are a grid's, in its first direction, splits in its second.
        body: The block.
        begin: Its first value.
        step: How far apart its values are.
        unroll: How many iterations a compiler is asked to unroll; 0 where it is free to choose.
        axis: Of lanes, the axis of the kernel along which they are neighbours: its index is that
            at the first lane plus the variable.
        count: Of lanes, how many are there, if there may be fewer: the others compute numbers that
            nothing depends on, and neither load, store nor accumulate.
    """

    var: str
    end: IndexValue
    kind: LoopKind
    body: Block
    begin: IndexValue = 0
    step: int = 1
    unroll: int = 0
    axis: int | None = None
    count: IndexValue | None = None

    @property
    def extent(self) -> int:
        """How many iterations a loop has that begins at nought and ends at a constant."""
        if not isinstance(self.end, int):
            raise InvalidGraphError(f"expected a loop with a constant end, got '{self}'")
        return self.end

    def __str__(self) -> str:
        begin = f" from {self.begin}" if self.begin != 0 else ""
        step = f" step {self.step}" if self.step != 1 else ""
        unroll = f" unroll {self.unroll}" if self.unroll else ""
        count = f" if {self.var} < {self.count}" if self.count is not None else ""
        return f"{self.kind.value} {self.var}{begin} < {self.end}{step}{unroll}{count}:"


@dataclass(frozen=True)
class If:
    """Run a block where a condition holds.

    Attributes:
        condition: A comparison, or a variable that is one.
        body: The block.
    """

    condition: IndexExpr
    body: Block


@dataclass(frozen=True, slots=True)
class Define:
    """Give an index expression a name.

    Attributes:
        name: A name, that of an axis among others.
        value: What it stands for.
    """

    name: str
    value: IndexValue


@dataclass(frozen=True, slots=True)
class Allocate:
    """Declare a local array.

    Attributes:
        name: Its name.
        dtype: What its elements are.
        axes: Loops for each iteration of which it has an element.
    """

    name: str
    dtype: torch.dtype
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute an instruction of the kernel.

    Attributes:
        value: Its position in the kernel's body.
        source: A local array that its value is read from, if it is not computed.
    """

    value: int
    source: str | None = None


@dataclass(frozen=True, slots=True)
class StoreLocal:
    """Write a value of the kernel to a local array.

    Attributes:
        array: The array.
        value: Position in the kernel's body.
    """

    array: str
    value: int


@dataclass(frozen=True, slots=True)
class Write:
    """Carry out a store of the kernel.

    Attributes:
        store: Its position among the stores.
        array: A local array that is written instead, in the store's dtype.
    """

    store: int
    array: str | None = None


@dataclass(frozen=True, slots=True)
class LaneArray:
    """The elements of all lanes, in a local array, which a vector instruction moves at once.

    Attributes:
        array: It has an element for each lane, in the dtype of the buffer that is read or written.
        extent: How many lanes there are.
        axis: The axis of the kernel along which they are neighbours.
        count: How many of them hold elements, if that may be fewer.
    """

    array: str
    extent: int
    axis: int
    count: IndexValue | None = None


@dataclass(frozen=True, slots=True)
class VectorLoad:
    """Read the elements of all lanes, as a load of the kernel does, with vector instructions.

    Attributes:
        value: The load's position in the kernel's body; its guard is the same for all lanes.
        lanes: Where they go.
    """

    value: int
    lanes: LaneArray


@dataclass(frozen=True, slots=True)
class VectorStore:
    """Write the elements of all lanes, as a store of the kernel does, with vector instructions.

    Attributes:
        store: Position among the kernel's stores.
        lanes: Where they come from.
    """

    store: int
    lanes: LaneArray


@dataclass(frozen=True, slots=True)
class InitAccumulator:
    """Set the accumulator of a reduction to its neutral element.

    Attributes:
        reduction: Its position in the kernel's body.
        array: The local array that is set.
    """

    reduction: int
    array: str


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Fold a value, or what a part of a reduction has come to, into what it has come to.

    Attributes:
        reduction: Its position in the kernel's body.
        array: The local array that holds what it has come to.
        source: A local array or a partial result to fold in; its operand if None.
    """

    reduction: int
    array: str
    source: str | None = None


@dataclass(frozen=True, slots=True)
class ReduceThreads:
    """Fold what a reduction has come to over the threads of a loop: all of them get the result.

    Attributes:
        reduction: Its position in the kernel's body.
        array: The local array that holds what it has come to.
        loop: The loop over threads.
    """

    reduction: int
    array: str
    loop: str


@dataclass(frozen=True, slots=True)
class Scan:
    """Fold a scan's operand into what it has come to, which is its value: in the order of lanes.

    Attributes:
        value: The scan's position in the kernel's body.
        array: The local array that holds what it has come to.
    """

    value: int
    array: str


@dataclass(frozen=True, slots=True)
class ScanThreads:
    """Let each thread know what a scan has come to before its own part of the row.

    Attributes:
        value: The scan's position in the kernel's body.
        array: A local array: what the thread's part comes to, then what all before it do.
        carry: A local array: what the row has come to before these threads, then after them.
        loop: The loop over threads, in the order of the row.
    """

    value: int
    array: str
    carry: str
    loop: str


@dataclass(frozen=True, slots=True)
class StorePartial:
    """Write what a reduction has come to where later launches find it.

    Attributes:
        partial: The partial result.
        array: The local array that holds what it has come to.
    """

    partial: str
    array: str


@dataclass(frozen=True, slots=True)
class PrecomputeReciprocal:
    """Prepare a value that many numbers are divided by, so that division is multiplication.

    Attributes:
        value: Position in the kernel's body.
    """

    value: int


Statement = (
    For
    | If
    | Define
    | Allocate
    | Compute
    | StoreLocal
    | Write
    | VectorLoad
    | VectorStore
    | InitAccumulator
    | Accumulate
    | ReduceThreads
    | Scan
    | ScanThreads
    | StorePartial
    | PrecomputeReciprocal
)
Block = tuple[Statement, ...]


def walk(body: Iterable[Statement]) -> Iterator[Statement]:
    """Yield all statements, each before those within it."""
    for statement in body:
        yield statement
        if isinstance(statement, (For, If)):
            yield from walk(statement.body)


def rewritten(body: Block, change: Callable[[Statement], Iterable[Statement]]) -> Block:
    """Return a block with each statement changed, those within another one before it."""
    result: list[Statement] = []
    for statement in body:
        if isinstance(statement, (For, If)):
            statement = replace(statement, body=rewritten(statement.body, change))
        result.extend(change(statement))
    return tuple(result)


def loops_of(body: Iterable[Statement], *kinds: LoopKind) -> list[For]:
    """Return the loops of some kinds, outer ones first."""
    return [s for s in walk(body) if isinstance(s, For) and s.kind in kinds]


def _is_storing(loop: For) -> bool:
    """Tell whether a serial loop stores, and leaves nothing for what follows."""
    return loop.kind is LoopKind.SERIAL and not any(
        isinstance(s, Accumulate | Scan) for s in walk(loop.body)
    )


def guarded(condition: IndexExpr | str, body: Block) -> Block:
    """Return a block in which what is stored is so only where a condition holds."""
    test = variable(condition) if isinstance(condition, str) else condition
    result: list[Statement] = []
    for statement in body:
        if isinstance(statement, Write | VectorStore | StorePartial):
            last = result[-1] if result else None
            if isinstance(last, If) and last.condition == test:
                result[-1] = replace(last, body=(*last.body, statement))
                continue
            statement = If(test, (statement,))
        elif isinstance(statement, For) and _is_storing(statement):
            statement = replace(statement, body=(If(test, statement.body),))
        elif isinstance(statement, (For, If)):
            statement = replace(statement, body=guarded(test, statement.body))
        result.append(statement)
    return tuple(result)
