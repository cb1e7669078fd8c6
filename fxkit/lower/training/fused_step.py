"""A fused step of an optimiser: all parameters in one loop, instead of several passes over each."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fxkit import config
from fxkit.errors import BuildError, UnsupportedError
from fxkit.lower.building.build import build
from fxkit.lower.runtime.kernel_call import stores_its_values
from fxkit.lower.training.step_text import CHUNK, step_text
from fxkit.torch_adapters.autograd_state import has_step_hooks
from fxkit.tracing.values.refusals import Refusal

_NAMES = {torch.float32: "f32", torch.float64: "f64"}
_PARALLEL = 8  # chunks below which waking the other threads costs more than they save
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class StepReport:
    """How the steps went.

    Attributes:
        fused: How many ran as one loop.
        eager: How many the optimiser itself made, by reason.
    """

    fused: int
    eager: Mapping[str, int]

    def __str__(self) -> str:
        lines = [f"{self.fused} steps fused, {sum(self.eager.values())} by the optimiser itself"]
        return "\n".join(lines + [f"  {count} times: {why}" for why, count in self.eager.items()])


class FusedStep:
    """A step of SGD, Adam or AdamW as one loop over all parameters; made by `fxkit.compile`.

    State and options stay the optimiser's: they are read at each step, so that schedulers,
    `state_dict` and further parameter groups work as before. What the loop does not cover, such as
    `amsgrad` or sparse gradients, the optimiser does itself, and so it does the first step, which
    makes its state.

    Args:
        optimizer: A `torch.optim.SGD`, `Adam` or `AdamW`.

    Attributes:
        optimizer: The optimiser.

    Raises:
        UnsupportedError: When it is another optimiser.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) not in _KINDS:
            raise UnsupportedError(
                f"expected a torch.optim SGD, Adam or AdamW, got {type(optimizer).__qualname__}",
                hint="call its step as it is",
            )
        self.optimizer = optimizer
        self._eager = optimizer.step
        self._fused = 0
        self._reasons: Counter[str] = Counter()
        self._chunks: dict[tuple[int, ...], _Chunks] = {}

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: Computes the loss again, as for `torch.optim`.

        Returns:
            What `closure` gave, or None.
        """
        setattr(self.optimizer, "_opt_called", True)  # noqa: B010 - what schedulers look for
        if closure is not None or (reason := self._objection()) is not None:
            self._reasons["a closure is given" if closure is not None else str(reason)] += 1
            return self._eager() if closure is None else self._eager(closure)  # type: ignore[call-arg]
        try:
            runs = [_GROUPS[type(self.optimizer)](self, g) for g in self.optimizer.param_groups]
        except (Refusal, BuildError) as refusal:
            self._reasons[str(refusal)] += 1
            return self._eager()
        for run in runs:
            run()
        self._fused += 1
        return None

    def report(self) -> StepReport:
        """Return how many steps were fused, and why the others were not."""
        return StepReport(self._fused, dict(self._reasons))

    def _objection(self) -> str | None:
        optimizer: Any = self.optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return "it has hooks"
        if has_step_hooks():
            return "there are hooks on all optimisers"
        if getattr(optimizer, "grad_scale", None) is not None:
            return "a gradient scaler is at work"
        if config.current().backend == "eager":
            return "FXKIT_BACKEND=eager turns kernels off"
        return None

    def adam(self, group: dict[str, Any]) -> Callable[[], None]:
        """Return the step of one group of Adam or AdamW, checked and ready to run."""
        _check_options(group, ("amsgrad", "maximize", "capturable", "differentiable", "fused"))
        parameters = _parameters(group)
        states = [self.optimizer.state.get(p, {}) for p in parameters]
        if any("exp_avg_sq" not in state for state in states):
            raise Refusal("it has no state for a parameter yet")
        lists = [
            parameters,
            [_gradient(p) for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
        ]
        _check_tensors(lists)
        steps = [state["step"] for state in states]
        if any(step.dtype is not torch.float32 or not step.is_cpu for step in steps):
            raise Refusal("a count of steps is no float32 in main memory")
        counts = [float(step) + 1 for step in steps]
        beta1, beta2 = (_number(beta) for beta in group["betas"])
        rate, decay = _number(group["lr"]), _number(group["weight_decay"])
        is_decoupled = group.get(
            "decoupled_weight_decay", type(self.optimizer) is torch.optim.AdamW
        )
        sizes = [-(rate / (1 - beta1**count)) for count in counts]
        roots = [(1 - beta2**count) ** 0.5 for count in counts]
        options = (
            *(beta1, 1 - beta1, beta2, 1 - beta2, _number(group["eps"])),
            *((0.0, 1 - rate * decay) if is_decoupled and decay else (decay, 1.0)),
        )

        def run() -> None:
            self._run("adam", [*lists, steps], [sizes, roots, options])

        return run if parameters else _nothing

    def sgd(self, group: dict[str, Any]) -> Callable[[], None]:
        """Return the step of one group of SGD, checked and ready to run."""
        _check_options(group, ("maximize", "differentiable", "fused"))
        parameters = _parameters(group)
        momentum = _number(group["momentum"])
        lists = [parameters, [_gradient(p) for p in parameters]]
        buffers = [self.optimizer.state.get(p, {}).get("momentum_buffer") for p in parameters]
        if momentum and any(buffer is None for buffer in buffers):
            raise Refusal("it has no state for a parameter yet")
        lists.append(buffers if momentum else parameters)
        _check_tensors(lists)
        rate, decay = _number(group["lr"]), _number(group["weight_decay"])
        fresh = 1 - _number(group["dampening"])
        options = (-rate, decay, momentum, fresh, float(group["nesterov"]))
        return (lambda: self._run("sgd", lists, [options])) if parameters else _nothing

    def _run(self, name: str, lists: list[list[Any]], numbers: list[Any]) -> None:
        """Run the loop over lists of tensors, the first of which are the parameters."""
        parameters = lists[0]
        key = tuple([p.numel() for p in parameters])
        chunks = self._chunks.get(key) or self._chunks.setdefault(key, _Chunks.of(key))
        function = getattr(_library(), f"fx_{name}_{_NAMES[parameters[0].dtype]}")
        pointers = [(ctypes.c_void_p * len(ts))(*[t.data_ptr() for t in ts]) for ts in lists]
        doubles = [(ctypes.c_double * len(values))(*values) for values in numbers]
        is_parallel = len(chunks.owner) >= _PARALLEL
        threads = torch.get_num_threads() if is_parallel else 1
        counts = (ctypes.c_long(len(parameters)), ctypes.c_long(threads))
        parts = (chunks.owner, chunks.begin, chunks.end)
        function(ctypes.c_long(len(chunks.owner)), *parts, *pointers, *doubles, *counts)
        written = [t for ts in (lists[0], *lists[2:]) for t in ts]
        torch.autograd.graph.increment_version(written)


@dataclass(frozen=True)
class _Chunks:
    """Parts of parameters: whose, and from which element to which."""

    owner: Any
    begin: Any
    end: Any

    @classmethod
    def of(cls, sizes: tuple[int, ...]) -> _Chunks:
        parts = [
            (owner, begin, min(begin + CHUNK, size))
            for owner, size in enumerate(sizes)
            for begin in range(0, size, CHUNK)
        ]
        columns = zip(*parts, strict=True) if parts else ((), (), ())
        return cls(*[(ctypes.c_long * len(parts))(*column) for column in columns])


@functools.cache
def _library() -> ctypes.CDLL:
    return build(step_text()).handle


def _nothing() -> None:
    """Do nothing: no parameter of the group has a gradient."""


def _check_options(group: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if group.get(name):
            raise Refusal(f"{name} is on")


def _parameters(group: dict[str, Any]) -> list[torch.Tensor]:
    return [p for p in group["params"] if p.grad is not None]


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        raise Refusal("an option is a tensor")
    return float(value)


def _check_tensors(lists: list[list[Any]]) -> None:
    """Refuse what the loop can't run over: it takes elements one by one, as they lie in memory."""
    _library()
    memories = [p.untyped_storage().data_ptr() for p in lists[0]]
    if len(set(memories)) != len(memories):
        raise Refusal("parameters share memory")
    for tensors in zip(*lists, strict=True):
        first = tensors[0]
        if first.dtype not in _NAMES or first.dtype is not lists[0][0].dtype:
            raise Refusal(f"a parameter is {first.dtype}, or another kind than the first")
        for tensor in tensors:
            if type(tensor) not in _TENSORS or tensor.layout is not torch.strided:
                raise Refusal("a tensor is of another class or layout")
            if not tensor.is_cpu or tensor.dtype is not first.dtype:
                raise Refusal("a tensor is on another device or of another type")
            if tensor.stride() != first.stride() or not _is_dense(tensor):
                raise Refusal("a parameter and its gradient lie in memory in different ways")
            if not stores_its_values(tensor) or tensor.is_inference():
                raise Refusal("a tensor is not what its memory says")


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_GROUPS: dict[type, Callable[[FusedStep, dict[str, Any]], Callable[[], None]]] = {
    torch.optim.SGD: FusedStep.sgd,
    torch.optim.Adam: FusedStep.adam,
    torch.optim.AdamW: FusedStep.adam,
}


def is_step(fn: Any) -> bool:
    """Tell whether a callable is the bound `step` of an optimiser that can be fused."""
    owner = getattr(fn, "__self__", None)
    return getattr(fn, "__name__", "") == "step" and type(owner) in _KINDS
