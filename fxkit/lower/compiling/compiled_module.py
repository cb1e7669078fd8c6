"""The module that `to_cpp` and `to_cuda` make: a graph whose fused regions run as kernels."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxkit.errors import UnsupportedError
from fxkit.ir.modes import has_modes, is_followed
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.inferred_types import is_of_type
from fxkit.lower.compiling.kernel_builds import BuiltKernels
from fxkit.lower.compiling.lower_report import FLOAT_LAYERS, KernelTrial, LowerReport
from fxkit.lower.compiling.plan import Plan, python_function
from fxkit.lower.compiling.program import make_program
from fxkit.lower.compiling.reasons import reason_in_aten
from fxkit.lower.families.family import kernels_of
from fxkit.lower.loop_ir.loop_ir import Kernel
from fxkit.lower.runtime import binding
from fxkit.lower.runtime.kernel_call import stores_its_values
from fxkit.torch_adapters.grad_modes import is_any_autocast_enabled

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
        trials: What became of the user's own kernels in it.
    """

    trials: tuple[KernelTrial, ...] = ()

    def __init__(
        self,
        gm: fx.GraphModule,
        plan: Plan,
        built: BuiltKernels,
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
        self._built = built
        self._calls: Counter[str] = Counter()
        self._forgotten = 0  # calls of the native program, whose own count only goes up
        self._forgotten_stand_ins = 0
        self._inputs = [
            (str(n.target), type_of(n)) for n in gm.graph.nodes if n.op == "placeholder"
        ]
        self._has_kernels = bool(plan.calls) or plan.has_packed or plan.has_native
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
    def parts(self) -> tuple[CompiledModule, ...]:
        """What was compiled: the module itself."""
        return (self,)

    @property
    def leaves_calls(self) -> bool:
        """Whether it leaves all calls to eager."""
        return not self._has_kernels

    @property
    def calls_in_eager(self) -> int:
        """How often the original graph, or the program in its place, ran."""
        return self._calls.total() - self._calls[_FUSED]

    def note_eager_call(self) -> None:
        """Count a call that the program itself has run in the place of a graph without kernels."""
        self._calls[_NO_KERNELS] += 1

    def forget_calls(self) -> None:
        """Report only the calls from here on: those before were trials."""
        self._calls.clear()
        self._forgotten = self._native_calls()
        self._forgotten_stand_ins = self._stand_ins()

    def _native_calls(self) -> int:
        return 0 if self._native_program is None else self._native_program.calls

    def _stand_ins(self) -> int:
        return 0 if self._native_program is None else self._native_program.stand_ins

    @property
    def input_types(self) -> tuple[Any, ...]:
        """The type of each input that it was compiled for."""
        return tuple(known for _, known in self._inputs)

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """Name in the report → what the kernel computes; equal regions share one."""
        return self._plan.kernels

    @property
    def plan(self) -> Plan:
        """The graph that runs, and the calls of kernels in it."""
        return self._plan

    @property
    def built(self) -> BuiltKernels:
        """The libraries that hold the kernels."""
        return self._built

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
        nodes = self.graph_module.graph.nodes
        return LowerReport(
            regions=self.regions,
            build_seconds=self.build_seconds,
            cache_hit=self.cache_hit,
            calls=self._calls[_FUSED] + self._native_calls() - self._forgotten,
            eager_calls={why: count for why, count in self._calls.items() if why != _FUSED},
            kernel_misses=sum(call.misses for call in self._plan.calls.values()),
            stand_ins=self._stand_ins() - self._forgotten_stand_ins,
            tensor_ops=frozenset(n.name for n in nodes if kernels_of(n) is not None),
            trials=self.trials,
            float_layers=self.graph_module.meta.get(FLOAT_LAYERS, ()),
        )


def _fits(value: Any, expected: Any) -> bool:
    if not isinstance(expected, TensorType):
        return is_of_type(expected, value)
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is expected.dtype
        and value.shape == expected.shape
        and value.device == expected.device
        and (value.layout is torch.strided and value.stride() == expected.stride)
        and stores_its_values(value)
    )


def _mode() -> str | None:
    """Return the mode that must see each of torch's calls, if one is on."""
    if has_modes():
        return "a torch mode is active"
    if is_any_autocast_enabled():
        return "autocast is on"
    if is_followed():
        return "a function transform or a tracer is active"
    return None
