"""`to_cpp`: a graph whose fused regions run as C++ kernels, and all else as before."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxkit import config
from fxkit.analysis.tensor_types import propagate_types
from fxkit.collector import paused_collector
from fxkit.errors import UnsupportedError
from fxkit.ir import types
from fxkit.ir.modes import has_modes, is_followed
from fxkit.ir.types import TensorType, type_of, type_of_value
from fxkit.lower.loops.attention import is_attention
from fxkit.lower.loops.candidates import is_candidate
from fxkit.lower.loops.loop_ir import Kernel
from fxkit.lower.loops.products.regions import is_product
from fxkit.lower.loops.regions import Policy, Region, partition
from fxkit.lower.running import binding
from fxkit.lower.running.building import Built, build_kernels
from fxkit.lower.running.kernel_stock import KernelStock
from fxkit.lower.running.plan import Calls, Plan, make_plan, python_function
from fxkit.lower.running.program import make_program
from fxkit.lower.running.reasons import reason_in_aten
from fxkit.lower.running.trials.attention import attention_objection_by_kind
from fxkit.lower.running.trials.convolutions import convolution_objection_by_kind
from fxkit.lower.running.trials.products import objection_by_kind
from fxkit.lower.running.tuning import spread, tuned


def to_cpp(
    gm: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    policy: Policy | None = None,
    tune: bool = False,
    stock: KernelStock | None = None,
) -> CompiledModule:
    """Compile what is pointwise, reduces, moves elements, multiplies or attends into C++ kernels.

    Neighbours share a kernel. All other nodes run in ATen as before. Kernels have no formula for
    gradients: when gradients are on and an input or a parameter asks for them, the original graph
    runs.

    Args:
        gm: A graph of torch-level or ATen-level calls. It is not changed, but for the types that
            are recorded on its nodes.
        args: Inputs of the types to compile for; calls with other types run the original graph.
        kwargs: Keyword inputs.
        policy: When a kernel pays.
        tune: Whether to time each kernel against eager, on made-up inputs, and keep the faster one;
            the times are kept beside the built kernels.
        stock: Kernels built for other sizes, which serve here too where they can.

    Returns:
        A module that is called like `gm`. Without a C++ compiler, or when it fails, a warning is
        given and the module runs the original graph.

    Raises:
        InvalidGraphError: When an input is missing, or a node can't take its operands; names the
            node, its source line and the types.
        UnsupportedError: When `args` is not a tuple.

    Example:
        >>> import torch, fxkit
        >>> gm = fxkit.symbolic_trace(lambda x: torch.softmax(x * 2, -1))
        >>> compiled = fxkit.lower.to_cpp(gm, (torch.ones(64, 256),))
        >>> [region.nodes for region in compiled.regions]
        [('mul', 'softmax')]
        >>> compiled(torch.ones(64, 256)).shape
        torch.Size([64, 256])
    """
    typed(gm, args, kwargs)
    if stock is None:
        return lower(policy, gm, tune=tune)
    # What pays at one size only would ask for another build at the next.
    structural = policy or Policy()
    calls = Calls(
        product=objection_by_kind,
        attention=attention_objection_by_kind,
        convolution=convolution_objection_by_kind,
    )
    build = functools.partial(stock.build, others=lambda: _alternatives(gm, structural))
    return lower(structural, gm, tune=tune, calls=calls, build=build)


def _alternatives(gm: fx.GraphModule, policy: Policy) -> dict[str, Kernel]:
    """Return the kernels of a graph all or none of whose products are left to torch's library."""
    kernels: dict[str, Kernel] = {}
    for reason in (None, "another size may be left to torch's library"):
        say = lambda _, r=reason: r  # noqa: E731
        calls = Calls(product=say, attention=say, convolution=say)
        plan = make_plan(gm, partition(gm, policy), calls)
        kernels |= {f"other_{len(kernels)}_{name}": kernel for name, kernel in plan.kernels.items()}
    return kernels


def to_cpp_as_recorded(
    gm: fx.GraphModule, reason: str, policy: Policy | None = None
) -> CompiledModule:
    """Compile a captured graph for the types that its nodes had when they were recorded.

    Serves a graph whose types can't be found without running it. Where a value inside has another
    type at a later call, eager computes what depends on it.

    Args:
        gm: The graph.
        reason: Why its types can't be found; that of all nodes in eager if some have no type.
        policy: When a kernel pays.
    """
    if not all(_has_type(node) for node in gm.graph.nodes if node.op != "output"):
        return left_to_eager(gm, reason)
    module = lower(policy, gm)
    is_fused = any(region.kernel is not None for region in module.regions)
    return module if is_fused else left_to_eager(gm, reason)


def lower(
    policy: Policy | None,
    gm: fx.GraphModule,
    *,
    tune: bool = False,
    calls: Calls | None = None,
    build: Callable[[Mapping[str, Kernel]], Built] = build_kernels,
) -> CompiledModule:
    """Compile a graph whose nodes have their types.

    Args:
        policy: When a kernel pays, and on which device kernels run.
        gm: The graph.
        tune: Whether to time kernels against eager; only on the processor.
        calls: How kernels are called.
        build: Builds kernels.
    """
    if config.current().backend == "eager":
        return left_to_eager(gm, "FXKIT_BACKEND=eager turns kernels off")
    # A default device, or whatever else modes do to tensors, is meant for those of the program.
    with torch._C.DisableTorchFunction():
        return _lowered(policy, gm, tune, calls, build)


def _lowered(
    policy: Policy | None,
    gm: fx.GraphModule,
    tune: bool,
    calls: Calls | None,
    build: Callable[[Mapping[str, Kernel]], Built],
) -> CompiledModule:
    with paused_collector(keeps_all=False):
        may_split = policy is not None and policy.splits
        plan = make_plan(gm, partition(gm, policy), calls, may_split)
    built = build(plan.kernels)
    if built.failures:
        error = next(iter(built.failures.values()))
        _warn_once(str(error))
        if not built.libraries:
            return left_to_eager(gm, error.message, built.source)
    built.bind(plan)
    if tune:
        policy = tuned(policy, plan)
        if policy.refused:
            return lower(policy, gm, calls=calls, build=build)
    spread(plan, policy)
    again = functools.partial(lower, policy, calls=calls, build=build)
    return CompiledModule(gm, plan, built, again)


def typed(
    gm: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Find the types of a graph's nodes for some inputs, unless they are known."""
    if not _is_typed(gm, args, dict(kwargs or {})):
        propagate_types(gm, args, kwargs)


def _is_typed(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether the types on the nodes are those for these inputs."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = [*args, *(kwargs[n.target] for n in inputs[len(args) :] if n.target in kwargs)]
    if len(given) != len(inputs):
        return False
    return all(
        _same_type(type_of(n), value) for n, value in zip(inputs, given, strict=True)
    ) and all(_has_type(n) for n in gm.graph.nodes if n.op != "output")


def _has_type(node: fx.Node) -> bool:
    return any(key in node.meta for key in (types.KEY, "val", "tensor_meta"))


def _same_type(expected: Any, value: Any) -> bool:
    found = type_of_value(value)
    return type(expected) is type(found) and bool(expected == found)


def left_to_eager(gm: fx.GraphModule, reason: str, source: str = "") -> CompiledModule:
    """Return a module that runs a graph as it is, and says why for each node of interest."""
    names = [node.name for node in gm.graph.nodes if is_candidate(node)]
    regions = [Region(name, (name,), None, reason, None) for name in names]
    again = functools.partial(left_to_eager, reason=reason, source=source)
    return CompiledModule(gm, Plan(gm.graph, regions=regions, reason=reason), Built(source), again)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(f"{text}\n  The graph runs in eager.", stacklevel=3)


@dataclass(frozen=True)
class LowerReport:
    """What `to_cpp` made of a graph, and how its calls went.

    Attributes:
        regions: Fused regions, then the candidates left to eager.
        build_seconds: Seconds to build, or to find, and load the kernels.
        cache_hit: Whether the kernels were there already.
        calls: How often the fused graph ran.
        eager_calls: How often the original graph ran, by reason.
        kernel_misses: Calls of single regions that ran in eager because of their inputs' types.
        whole: Names of the products, convolutions and attention, which kernels compute only where
            they are faster than torch's library.
    """

    regions: tuple[Region, ...]
    build_seconds: float
    cache_hit: bool
    calls: int
    eager_calls: Mapping[str, int]
    kernel_misses: int
    whole: frozenset[str] = frozenset()

    @property
    def fused(self) -> int:
        """Number of pointwise and normalising nodes in fused regions."""
        return self._count(is_whole=False, is_fused=True)

    @property
    def candidates(self) -> int:
        """Number of pointwise and normalising nodes."""
        return self._count(is_whole=False)

    @property
    def whole_in_kernels(self) -> int:
        """Number of products, convolutions and attention that kernels compute."""
        return self._count(is_whole=True, is_fused=True)

    def _count(self, is_whole: bool, is_fused: bool = False) -> int:
        names = (n for r in self.regions if r.kernel or not is_fused for n in r.nodes)
        return sum((name in self.whole) == is_whole for name in names)

    def __str__(self) -> str:
        fused = [r for r in self.regions if r.kernel is not None]
        kernels = len({r.kernel for r in fused})
        kind = "found in the cache" if self.cache_hit else "built"
        share = f" ({self.fused / self.candidates:.1%})" if self.candidates else ""
        lines = [
            f"{self.fused} of {self.candidates} pointwise and normalising nodes fused{share} into "
            f"{len(fused)} regions, {kernels} kernels {kind} in {self.build_seconds:.3f} s",
            *self._whole_line(),
            f"{'region':<12} {'kernel':<11} {'nodes':>5} {'MB saved':>9}  members",
        ]
        for r in fused:
            saved = (r.bytes_saved or 0) / 1e6
            members = ", ".join(r.nodes)
            lines.append(f"{r.name:<12} {r.kernel:<11} {len(r.nodes):>5} {saved:>9.2f}  {members}")
        lines += [f"{r.name:<24} not fused: {r.reason}" for r in self.regions if r.reason]
        lines.append(f"calls: {self.calls} fused, {sum(self.eager_calls.values())} in eager")
        lines += [f"  in eager {n} times: {why}" for why, n in self.eager_calls.items()]
        if self.kernel_misses:
            lines.append(f"  {self.kernel_misses} calls of kernels ran in eager for their types")
        return "\n".join(lines)

    def _whole_line(self) -> list[str]:
        if not self.whole:
            return []
        count = f"{self.whole_in_kernels} of {len(self.whole)}"
        return [f"{count} products, convolutions and attention in kernels, the others in ATen"]


_FUSED = "fused"
_NO_KERNELS = "there are no kernels"


class CompiledModule(nn.Module):
    """A graph whose fused regions run as kernels; made by `to_cpp`.

    Attributes:
        graph_module: The original graph; parameters are read from it at each call.
        regions: What became of each pointwise or normalising node.
        source: The C++ text of the kernels.
        build_seconds: Seconds to build, or to find, and load the kernels.
        cache_hit: Whether the kernels were there already.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        plan: Plan,
        built: Built,
        lower_again: Callable[[fx.GraphModule], CompiledModule],
    ) -> None:
        super().__init__()
        self.graph_module = gm
        self.regions = tuple(plan.regions)
        self.source = built.source
        self.build_seconds = built.seconds
        self.cache_hit = built.cache_hit
        self._lower_again = lower_again
        self._plan = plan
        self._calls: Counter[str] = Counter()
        self._inputs = [
            (str(n.target), type_of(n)) for n in gm.graph.nodes if n.op == "placeholder"
        ]
        self._has_kernels = bool(plan.calls) or plan.has_packed
        self._run: Callable[..., Any] | None = None
        self._native_program: Any = None
        self._miss: Any = None
        self._asks_for_program = self._has_kernels
        self._try_program()

    @property
    def native_program(self) -> Any | None:
        """The whole graph as one call of the binding; None where Python runs it.

        Until the binding is built, which is once on a machine, Python runs it too; to ask for the
        program waits for that.
        """
        if self._asks_for_program:
            self._make_program()
        return self._native_program

    @native_program.setter
    def native_program(self, program: Any | None) -> None:
        self._asks_for_program = False
        self._native_program = program

    def _try_program(self) -> None:
        """Make the program, unless that means to wait for a compiler."""
        if self._asks_for_program and not binding.is_awaited():
            self._make_program()

    def _make_program(self) -> None:
        self.native_program = make_program(self.graph_module, self._plan.graph)
        self._miss = binding.miss()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        """Copy the graph and its parameters, and compile them: kernels are found in the cache."""
        copied = self._lower_again(copy.deepcopy(self.graph_module, memo))
        memo[id(self)] = copied
        kept = ("training", *(name for name in vars(self) if name.endswith("_hooks")))
        vars(copied).update({n: copy.deepcopy(vars(self)[n], memo) for n in kept})
        return copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graph; see `to_cpp` for when the original one runs."""
        if self._asks_for_program:
            self._try_program()
        program = self._native_program
        if program is not None and not kwargs:
            result = program(*args)
            if result is not self._miss:
                return result
        objection = self._objection(args, kwargs)
        if objection is None:
            self._calls[_FUSED] += 1
            return self._in_python()(self.graph_module, *args, **kwargs)
        self._calls[objection] += 1
        return self.graph_module(*args, **kwargs)

    def _in_python(self) -> Callable[..., Any]:
        """Return the graph of kernels as a function of Python."""
        if self._run is None:
            self._run = python_function(self._plan.graph)
        return self._run

    def _objection(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Return why the kernels can't serve a call, or None."""
        if not self._has_kernels:
            return _NO_KERNELS
        values = args if not kwargs else self._ordered(args, kwargs)
        if len(values) != len(self._inputs):
            return "the number of inputs is another"
        for value, (name, expected) in zip(values, self._inputs, strict=True):
            if not _fits(value, expected):
                return f"the type of input {name} is another"
        return _mode() or self._gradient(values)

    def _ordered(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        names = [name for name, _ in self._inputs[len(args) :]]
        return (*args, *(kwargs[name] for name in names if name in kwargs))

    def _gradient(self, values: tuple[Any, ...]) -> str | None:
        if not torch.is_grad_enabled():
            return None
        if any(isinstance(v, torch.Tensor) and v.requires_grad for v in values):
            return "gradients are on and an input asks for them"
        if any(p.requires_grad for p in self.graph_module.parameters()):
            return "gradients are on and a parameter asks for them"
        return None

    @property
    def has_kernels(self) -> bool:
        """Whether any part of the graph runs in a kernel, or with a packed weight."""
        return self._has_kernels

    @property
    def calls_in_eager(self) -> int:
        """How often the original graph, or the program in its place, ran."""
        return self._calls.total() - self._calls[_FUSED]

    def note_eager_call(self) -> None:
        """Count a call that the program itself has run in the place of a graph without kernels."""
        self._calls[_NO_KERNELS] += 1

    @property
    def input_types(self) -> tuple[Any, ...]:
        """The type of each input that it was compiled for."""
        return tuple(known for _, known in self._inputs)

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """Name in the report → what the kernel computes; equal regions share one."""
        return self._plan.kernels

    @property
    def lowered(self) -> fx.GraphModule:
        """The graph that runs: calls of kernels among the nodes that eager computes."""
        return fx.GraphModule(self.graph_module, self._plan.graph)

    @property
    def reasons(self) -> dict[str, str]:
        """Name of each node that torch computes, as in the original graph → why."""
        nodes = self.graph_module.graph.nodes
        plan = self._plan
        fused = {name for r in plan.regions if r.kernel is not None for name in r.nodes}
        left = {name: r.reason for r in plan.regions if r.reason for name in r.nodes}
        found = {n.name: reason_in_aten(n) for n in nodes if n.name not in fused}
        return {
            name: left.get(name) or plan.reason or reason
            for name, reason in found.items()
            if reason is not None
        }

    def explain(self, node: fx.Node | str) -> str:
        """Say which kernel computes a node of the original graph, or why torch does.

        Args:
            node: The node, or its name.

        Raises:
            UnsupportedError: When the graph has no such node.
        """
        name = node if isinstance(node, str) else node.name
        for region in self.regions:
            if region.kernel is not None and name in region.nodes:
                return f"%{name} is computed by {region.kernel}, in {region.name}"
        reason = self.reasons.get(name)
        if reason is not None:
            return f"torch computes %{name}: {reason}"
        if all(name != n.name for n in self.graph_module.graph.nodes):
            raise UnsupportedError(f"expected a node of the compiled graph, got %{name}")
        return f"%{name} computes nothing: it is an input, an attribute, a view or a result"

    def report(self) -> LowerReport:
        """Return what was fused, what was not and why, and how calls went."""
        program, nodes = self._native_program, self.graph_module.graph.nodes
        return LowerReport(
            self.regions,
            self.build_seconds,
            self.cache_hit,
            self._calls[_FUSED] + (0 if program is None else program.calls),
            {why: count for why, count in self._calls.items() if why != _FUSED},
            sum(call.misses for call in self._plan.calls.values()),
            frozenset(n.name for n in nodes if is_product(n) or is_attention(n)),
        )


def _fits(value: Any, expected: Any) -> bool:
    if not isinstance(expected, TensorType):
        return _same_type(expected, value)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is expected.dtype
        and value.shape == expected.shape
        and value.device == expected.device
        and (value.layout is torch.strided and value.stride() == expected.stride)
        and not (value.is_neg() or value.is_conj())
    )


def _mode() -> str | None:
    """Return the mode that must see each of torch's calls, if one is on."""
    if has_modes():
        return "a torch mode is active"
    if torch._C._is_any_autocast_enabled():
        return "autocast is on"
    if is_followed():
        return "a function transform or a tracer is active"
    return None
