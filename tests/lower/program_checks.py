"""How the results of a compiled random program are held to eager's, and eager's to float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

Tensors = tuple[torch.Tensor, ...]

# Epsilons, relative to the largest value or to one, below which no difference is looked at. The
# program in float64 is no measure of one in float64.
EPSILONS = 4.0
EPSILONS_OF_FLOAT64 = 64.0

# How often a program is run with values that are off by a rounding.
ROUNDINGS = 3


def compare(compiled: Callable[..., Any], gm: fx.GraphModule, inputs: Tensors) -> Tensors:
    """Hold a compiled program's results, and its inputs after it, to eager's.

    Each is eager's, or at most twice as far from the program in float64 as eager's is, or as a
    program is whose values are rounded once more.

    Returns:
        The results of the compiled program.
    """
    found, after = run(compiled, inputs)
    hold(found, after, gm, inputs)
    return found


def hold(
    found: Tensors,
    after: Tensors,
    gm: fx.GraphModule,
    inputs: Tensors,
    eager_way: Callable[..., Any] | None = None,
) -> None:
    """Hold results, and inputs after the call, to eager's.

    Eager is the graph itself, or `eager_way`, which runs it elsewhere.

    Strides are compared only where there are neighbours: along a dimension of size one nothing
    is read by them, and torch itself gives now this number, now that.
    """
    eager = _all(*run(eager_way or gm, inputs))
    exact = _all(*run(_wide(gm), _doubled(inputs)))
    rounded: list[Tensors] = []
    has_singles = _has_singles(gm, inputs)
    for place, (a, b, right) in enumerate(zip(_all(found, after), eager, exact, strict=True)):
        assert (a.dtype, a.shape, _steps(a)) == (b.dtype, b.shape, _steps(b)), place
        floor = _floor(b, has_singles)
        if is_as_good(a, [b], right, floor):
            continue
        rounded = rounded or [_rounded(gm, inputs, number) for number in range(ROUNDINGS)]
        others = [b, *(one[place] for one in rounded)]
        assert is_as_good(a, others, right, floor), (
            f"value {place} is {_farthest(a, right)}, eager's {_farthest(b, right)}"
        )


def _farthest(values: torch.Tensor, right: torch.Tensor) -> str:
    """Say where values are farthest from the right ones."""
    far = (values.double() - right.double()).abs().nan_to_num(float("inf")).flatten()
    place = int(far.argmax())
    return f"{values.flatten()[place]} for {right.flatten()[place]} at {place} of {far.numel()}"


def _all(results: Tensors, inputs: Tensors) -> Tensors:
    return (*results, *inputs)


def _has_singles(gm: fx.GraphModule, inputs: Tensors) -> bool:
    """Tell whether a program computes anything in less than float64."""
    casts = [n.args[1] for n in gm.graph.find_nodes(op="call_function", target=torch.Tensor.to)]
    return any(dtype != torch.float64 for dtype in (*casts, *(t.dtype for t in inputs)))


def _floor(eager: torch.Tensor, has_singles: bool) -> float:
    """Return the error that any order of the same steps may make."""
    if not eager.is_floating_point() or not eager.isfinite().any():
        return 0.0
    scale = max(1.0, float(eager[eager.isfinite()].abs().max()))
    if eager.dtype == torch.float64 and not has_singles:
        return EPSILONS_OF_FLOAT64 * torch.finfo(eager.dtype).eps * scale
    return EPSILONS * max(torch.finfo(d).eps for d in (eager.dtype, torch.float32)) * scale


def run(program: Callable[..., Any], inputs: Tensors) -> tuple[Tensors, Tensors]:
    """Return the results of a program, and its inputs after it."""
    copies = tuple(map(_copied, inputs))
    return program(*copies), copies


def _copied(x: torch.Tensor) -> torch.Tensor:
    """Return a copy that lies in memory as the original does."""
    size = x.untyped_storage().nbytes() // x.itemsize
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, (size,)).clone()
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _wide(gm: fx.GraphModule) -> Callable[..., Any]:
    """Return a program with each of its floating point dtypes replaced by float64."""
    wide = _widened(gm)

    def run_wide(*inputs: torch.Tensor) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return wide.run(*inputs)
        finally:
            torch.set_default_dtype(before)

    return run_wide


def _widened(gm: fx.GraphModule) -> fx.Interpreter:
    wide = copy.deepcopy(gm)
    for node in wide.graph.find_nodes(op="call_function", target=torch.Tensor.to):
        node.update_arg(1, torch.float64)
        node.update_kwarg("copy", True)  # as it does where it changes the dtype
    return fx.Interpreter(wide)


def _doubled(inputs: Tensors) -> Tensors:
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


class _Dtypes(fx.Interpreter):
    """Notes the dtype of every value of a program."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.found: dict[str, torch.dtype] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.found[n.name] = result.dtype
        return result


class _Rounding(fx.Interpreter):
    """Runs a program in float64 with each new value off by at most one epsilon of its dtype."""

    def __init__(self, wide: fx.Interpreter, dtypes: dict[str, torch.dtype]) -> None:
        super().__init__(wide.module)
        self._dtypes = dtypes

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        read = self.fetch_args_kwargs_from_env(n)
        memory = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves(read)
                  if isinstance(t, torch.Tensor)}  # fmt: skip
        dtype = self._dtypes.get(n.name, torch.int64)
        if dtype.is_floating_point and result.untyped_storage().data_ptr() not in memory:
            noise = 2 * torch.rand(result.shape, dtype=torch.float64) - 1
            result.mul_(1 + torch.finfo(dtype).eps * noise)
        return result


def _rounded(gm: fx.GraphModule, inputs: Tensors, number: int) -> Tensors:
    """Return what float64 gives where values are rounded, in one of many ways."""
    dtypes = _Dtypes(gm)
    run(dtypes.run, inputs)
    torch.manual_seed(number)
    rounding = _Rounding(_widened(gm), dtypes.found)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _all(*run(rounding.run, _doubled(inputs)))
    finally:
        torch.set_default_dtype(before)


def is_as_good(
    found: torch.Tensor, others: list[torch.Tensor], exact: torch.Tensor, floor: float
) -> bool:
    """Tell whether a result is at most twice as far from the exact one as one of the others."""
    ours, right = found.double(), exact.double()
    theirs = [other.double() for other in others]
    if not found.is_floating_point():
        return _count(ours != right) <= 2 * max(_count(t != right) for t in theirs)
    if _count(_is_other(ours, right)) > 2 * max(_count(_is_other(t, right)) for t in theirs):
        return False
    where = right.isfinite() & theirs[0].isfinite()  # eager's error is infinite elsewhere
    far = max(_distance(t, right, where) for t in theirs)
    return _distance(ours, right, where) <= 2 * far + floor


def _count(mask: torch.Tensor) -> int:
    return int(mask.sum())


def _distance(values: torch.Tensor, right: torch.Tensor, where: torch.Tensor) -> float:
    kept = values.isfinite() & where
    return float((values - right)[kept].abs().max()) if kept.any() else 0.0


def _is_other(values: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Tell where a value is finite and the right one is not, or the other way round."""
    is_same = (values == right) | (values.isnan() & right.isnan())
    return ~is_same & ~(values.isfinite() & right.isfinite())


def _steps(x: torch.Tensor) -> list[int]:
    """Return the strides of the dimensions along which there are neighbours."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]


def compare_calls(compiled: Callable[..., Any], gm: fx.GraphModule, inputs: Tensors) -> None:
    """Call a compiled program with values and layouts that change, and hold on to its results.

    No later call may change the result of an earlier one, from whichever thread it comes.
    """
    others = _other_values(inputs)
    given = [inputs, inputs, others, _other_layouts(inputs), inputs]
    results = [run(compiled, one) for one in given]
    copies = [tuple(t.clone() for t in found) for found, _ in results]
    with ThreadPoolExecutor(2) as threads:
        at_once = [inputs, others] * 3
        results += threads.map(lambda one: run(compiled, one), at_once)
    for (found, after), one in zip(results, given + at_once, strict=True):
        hold(found, after, gm, one)
    for (found, _), before in zip(results, copies, strict=False):
        for result, copied in zip(found, before, strict=True):
            assert torch.equal(result.nan_to_num(0), copied.nan_to_num(0)), "it has changed"


def compare_sizes(compiled: Callable[..., Any], gm: fx.GraphModule, inputs: Tensors) -> int:
    """Call a program that serves all sizes with several; return how many of them eager takes.

    Where eager raises, the compiled program has to as well.
    """
    taken = 0
    for growth in (0, 2, 5):
        grown = _grown(inputs, growth)
        try:
            run(gm.forward, grown)
        except (RuntimeError, IndexError, ValueError) as error:
            _must_raise(compiled, grown, error)
            continue
        hold(*run(compiled, grown), gm, grown)
        taken += 1
    return taken


def _must_raise(compiled: Callable[..., Any], inputs: Tensors, error: Exception) -> None:
    try:
        run(compiled, inputs)
    except type(error):
        return
    raise AssertionError(f"it takes what eager does not: {error}")


def _grown(inputs: Tensors, growth: int) -> Tensors:
    """Return inputs whose larger sizes have grown, alike where they were alike."""
    return tuple(_grow(tensor, growth) for tensor in inputs)


def _grow(x: torch.Tensor, growth: int) -> torch.Tensor:
    for dim, size in enumerate(x.shape):
        if size >= 5:
            ids = torch.arange(size + growth) % size
            x = x.index_select(dim, ids)
    return x


def _other_values(inputs: Tensors) -> Tensors:
    """Return inputs of the same types; integers, which may be positions, stay as they are."""
    return tuple(t.flip(0) * 0.5 if t.is_floating_point() and t.dim() else t for t in inputs)


def _other_layouts(inputs: Tensors) -> Tensors:
    """Return the same inputs with other strides, and beginning inside of their memory."""
    spread = (torch.stack([t, t], dim=-1)[..., 1] for t in inputs)
    return tuple(t.mT.contiguous().mT if t.dim() > 2 else t for t in spread)
