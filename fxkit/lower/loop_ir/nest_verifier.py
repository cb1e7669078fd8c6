"""Checks of a loop nest: all is defined before use, stored once, and within its bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from fxkit.errors import InvalidGraphError
from fxkit.lower.loop_ir.index_expressions import (
    IndexExpr,
    IndexValue,
    Range,
    binary,
    range_of,
    variable,
    variables_of,
)
from fxkit.lower.loop_ir.loop_ir import Access
from fxkit.lower.loop_ir.loop_nest import LoopNest
from fxkit.lower.loop_ir.nest_statements import (
    Accumulate,
    Allocate,
    Block,
    Compute,
    Define,
    For,
    If,
    InitAccumulator,
    LoopKind,
    PrecomputeReciprocal,
    ReduceThreads,
    Scan,
    ScanThreads,
    Statement,
    StoreLocal,
    StorePartial,
    VectorLoad,
    VectorStore,
    Write,
)


def verify_nest(nest: LoopNest) -> None:
    """Check a nest.

    Raises:
        InvalidGraphError: When a variable, a value or an array is read where it is not defined; an
            index may leave its axis; a store of the kernel is carried out not once; a reduction is
            folded over threads of which some may be elsewhere, or read before it is complete.
    """
    verifier = _Verifier(nest)
    verifier.block(nest.body, _Scope())
    for position in range(len(nest.kernel.stores)):
        count = verifier.stored[position]
        if count != 1:
            raise InvalidGraphError(
                f"expected one statement that carries out '{nest.kernel.store_line(position)}', "
                f"got {count}\n{nest}"
            )


@dataclass
class _Scope:
    """What statements of a block may read.

    Attributes:
        ranges: Variable → its least and largest value.
        definitions: Name → what it was defined as.
        arrays: Local arrays by their names.
        values: Positions of values that are known.
        loops: Kinds of the loops around, by variable.
        divergent: Whether some threads of a block may be elsewhere.
    """

    ranges: dict[str, Range] = field(default_factory=dict)
    definitions: dict[str, IndexValue] = field(default_factory=dict)
    arrays: dict[str, Allocate] = field(default_factory=dict)
    values: set[int] = field(default_factory=set)
    loops: dict[str, LoopKind] = field(default_factory=dict)
    divergent: bool = False

    def inner(self, **changes: object) -> _Scope:
        """Return a copy that a block within may add to."""
        copies = {
            "ranges": dict(self.ranges),
            "definitions": dict(self.definitions),
            "arrays": dict(self.arrays),
            "values": set(self.values),
            "loops": dict(self.loops),
        }
        return replace(self, **{**copies, **changes})  # type: ignore[arg-type]


class _Verifier:
    def __init__(self, nest: LoopNest) -> None:
        self._nest, self._kernel = nest, nest.kernel
        self._partials = {p.name for p in nest.partials}
        self.stored: Counter[int] = Counter()
        self._computed: set[int] = set()
        self._ready: set[str] = set()

    def block(self, body: Block, scope: _Scope) -> None:
        for statement in body:
            self._check(statement, scope)

    def _check(self, statement: Statement, scope: _Scope) -> None:
        match statement:
            case For():
                self._loop(statement, scope)
            case If(condition, body):
                self._range(condition, scope)
                refined = _refined(condition, scope)
                self.block(body, scope.inner(ranges=refined, divergent=True))
            case Define(name, value):
                if name in scope.ranges:
                    self._fail(f"a name for '{name} = {value}' that is not taken", name)
                scope.ranges[name] = self._range(value, scope)
                scope.definitions[name] = value
            case Allocate(name):
                scope.arrays[name] = statement
            case Compute(value, source):
                self._compute(value, source, scope)
            case StoreLocal(array, value):
                self._known(value, scope)
                self._array(array, scope)
                self._ready.add(array)
            case Write(store, array):
                self._write(store, array, scope)
            case VectorLoad(value, lanes):
                self._array(lanes.array, scope)
                within = self._with_lanes(scope, lanes.extent, lanes.axis, lanes.count)
                self._bounds(self._kernel.body[value].detail, within)
                self._ready.add(lanes.array)
            case VectorStore(store, lanes):
                self._filled(lanes.array, scope)
                within = self._with_lanes(scope, lanes.extent, lanes.axis, lanes.count)
                self._bounds(self._kernel.stores[store].access, within)
                self.stored[store] += 1
            case InitAccumulator(_, array):
                self._array(array, scope)
                self._ready.add(array)
            case Accumulate(reduction, array, source):
                self._accumulate(reduction, array, source, scope)
            case ReduceThreads(_, array, loop):
                self._filled(array, scope)
                if scope.loops.get(loop) is not LoopKind.THREAD or scope.divergent:
                    self._fail(f"a loop of threads {loop!r}, all of them here", scope.loops)
            case Scan(value, array):
                self._filled(array, scope)
                self._operands(self._kernel.body[value].operands, scope)
                scope.values.add(value)
                self._computed.add(value)
            case ScanThreads(_, array, carry, loop):
                self._filled(array, scope)
                self._filled(carry, scope)
                if scope.loops.get(loop) is not LoopKind.THREAD or scope.divergent:
                    self._fail(f"a loop of threads {loop!r}, all of them here", scope.loops)
            case StorePartial(partial, array):
                self._filled(array, scope)
                self._partial(partial)
            case PrecomputeReciprocal(value):
                self._known(value, scope)

    # Loops and indices.

    def _loop(self, loop: For, scope: _Scope) -> None:
        (low, _), (_, high) = self._range(loop.begin, scope), self._range(loop.end, scope)
        if high <= low:
            self.stored.update(
                s.store for s in _stores(loop.body) if not isinstance(s, Write) or s.array is None
            )
            return
        if loop.kind is LoopKind.LANES:
            assert loop.axis is not None
            inner = self._with_lanes(scope, high, loop.axis, loop.count)
        else:
            if loop.var in scope.ranges:
                self._fail(f"a variable of '{loop}' that is not taken", loop.var)
            inner = scope.inner()
            inner.divergent |= self._differs(loop.begin, scope) or self._differs(loop.end, scope)
        inner.ranges[loop.var] = (low, high - 1)
        inner.loops[loop.var] = loop.kind
        self.block(loop.body, inner)

    def _differs(self, value: IndexValue, scope: _Scope) -> bool:
        """Tell whether an expression may differ between the threads of a block."""
        return any(
            scope.loops.get(name) is LoopKind.THREAD
            or (name in scope.definitions and self._differs(scope.definitions[name], scope))
            for name in variables_of(value)
        )

    def _with_lanes(self, scope: _Scope, lanes: int, axis: int, count: IndexValue | None) -> _Scope:
        name = self._nest.axes[axis]
        low, high = self._range(variable(name), scope)
        last = high + lanes - 1
        if count is not None:
            size = self._kernel.sizes[axis]
            named = scope.definitions.get(str(count), count)
            if named != binary("-", size, variable(name)):
                self._fail(f"lanes that are counted as {size} - {name}", named)
            last = min(last, size - 1)
        inner = scope.inner()
        inner.ranges[name] = (low, last)
        return inner

    def _range(self, value: IndexValue, scope: _Scope) -> Range:
        return range_of(value, scope.ranges)

    def _bounds(self, access: Access, scope: _Scope) -> None:
        """Check that the index along each axis that an address depends on lies on the axis."""
        names = zip(self._nest.axes, self._kernel.sizes, access.strides, strict=True)
        for name, size, stride in names:
            if not stride:
                continue
            low, high = self._range(variable(name), scope)
            if low < 0 or high >= size:
                self._fail(f"an index {name!r} in [0, {size})", f"one in [{low}, {high + 1})")

    # Values and arrays.

    def _compute(self, value: int, source: str | None, scope: _Scope) -> None:
        instruction = self._kernel.body[value]
        if source is not None:
            self._filled(source, scope)
        elif instruction.is_reduction:
            self._fail(f"an array that '{self._kernel.line(value)}' is read from", None)
        else:
            self._operands(instruction.operands, scope)
            if instruction.op in ("load", "index"):
                self._bounds(instruction.detail, scope)
        scope.values.add(value)
        self._computed.add(value)

    def _operands(self, operands: tuple[int, ...], scope: _Scope) -> None:
        for operand in operands:
            self._known(operand, scope)

    def _known(self, value: int, scope: _Scope) -> None:
        is_array = f"v{value}" in scope.arrays and value in self._computed
        if value in scope.values or is_array or self._kernel.body[value].op == "const":
            return
        self._fail(f"%{value} to be computed before it is read", self._kernel.line(value))

    def _array(self, name: str, scope: _Scope) -> None:
        if name not in scope.arrays:
            self._fail(f"a local array {name!r} that is declared", list(scope.arrays))
        missing = [axis for axis in scope.arrays[name].axes if axis not in scope.loops]
        if missing and not set(missing) <= {"l"}:
            self._fail(f"loops over {missing} around what reads {name!r}", list(scope.loops))

    def _filled(self, name: str, scope: _Scope) -> None:
        self._array(name, scope)
        if name not in self._ready:
            self._fail(f"{name!r} to be written before it is read", "no statement that does")

    def _accumulate(self, reduction: int, array: str, source: str | None, scope: _Scope) -> None:
        self._filled(array, scope)
        if source is None:
            self._known(self._kernel.body[reduction].operands[0], scope)
        elif source in scope.arrays:
            self._filled(source, scope)
        else:
            self._partial(source)

    def _write(self, store: int, array: str | None, scope: _Scope) -> None:
        self._known(self._kernel.stores[store].value, scope)
        if array is not None:
            self._array(array, scope)
            self._ready.add(array)
            return
        self._bounds(self._kernel.stores[store].access, scope)
        self.stored[store] += 1

    def _partial(self, name: str) -> None:
        if name not in self._partials:
            self._fail(f"a partial result {name!r} that the nest has", sorted(self._partials))

    def _fail(self, expected: str, found: object) -> None:
        raise InvalidGraphError(f"expected {expected}, got {found}\n{self._nest}")


def _refined(condition: IndexExpr, scope: _Scope) -> dict[str, Range]:
    """Return the ranges of variables where a condition holds."""
    ranges = dict(scope.ranges)
    named = scope.definitions.get(condition.op, condition)
    if isinstance(named, IndexExpr) and named.op == "<":
        left, right = named.operands
        if isinstance(left, IndexExpr) and not left.operands:
            low, high = ranges[left.op]
            ranges[left.op] = (low, min(high, range_of(right, ranges)[1] - 1))
    return ranges


def _stores(body: Block) -> list[Write | VectorStore]:
    found: list[Write | VectorStore] = []
    for statement in body:
        if isinstance(statement, Write | VectorStore):
            found.append(statement)
        elif isinstance(statement, (For, If)):
            found.extend(_stores(statement.body))
    return found
