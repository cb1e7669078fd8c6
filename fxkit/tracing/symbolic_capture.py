"""Mode `symbolic`: a program followed with placeholders for the tensors in its arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from fxkit.tracing.captured import Captured
from fxkit.tracing.guarding import guards as g
from fxkit.tracing.parameter_names import placeholder_names
from fxkit.tracing.recorder.state_restore import Mutations
from fxkit.tracing.recording.guarded_graph import GuardedGraph
from fxkit.tracing.recording.run_guards import module_guards, structure_guard
from fxkit.tracing.symbolic import SymbolicTracer, traced_module
from fxkit.tracing.values.structure import Blueprint


class _LeafTracer(SymbolicTracer):
    """Follows a program with one placeholder for each tensor in given arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> None:
        super().__init__()
        self._args = args
        self._kwargs = kwargs
        self._names = names
        self.result: Blueprint | None = None
        self.is_single = False

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return a function of flat placeholders, and those placeholders."""
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._names]
        nested = Blueprint((self._args, self._kwargs), _numbers(), {})

        def flat(*values: Any) -> Any:
            args, kwargs = nested.build(list(values[is_module:]), [], {})
            return self._flat_result(self.run(root_fn, values[:is_module], args, kwargs))

        return flat, [self.root, *proxies] if is_module else proxies

    def _flat_result(self, result: Any) -> Any:
        values: list[Any] = []

        def place(value: Any, path: str) -> int:
            values.append(value)
            return len(values) - 1

        self.result = Blueprint(result, place, {}, "the result")
        self.is_single = len(values) == 1 and values[0] is result
        return result if self.is_single else tuple(values)


def _numbers() -> Callable[[Any, str], int]:
    count = iter(range(sys.maxsize))
    return lambda value, path: next(count)


def capture_symbolically(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Captured:
    """Follow `fn` with placeholders for the tensors in its arguments.

    Args:
        fn: A function, module, or method of a module.
        args: Positional arguments; only their nesting and those that are not tensors matter.
        kwargs: Keyword arguments.

    Raises:
        CaptureError: When the program needs more than a placeholder.
    """
    captured = Captured(fn)
    call = captured.take_apart(args, kwargs)
    tracer = _LeafTracer(args, kwargs, placeholder_names(fn, call.parts.tensor_paths))
    module = traced_module(tracer, fn)
    assert tracer.result is not None
    regions = tracer.regions
    captured.keep(
        GuardedGraph(
            graph_module=module,
            guards=(
                g.ModesGuard("torch's modes", ambient=call.ambient, defaults=call.defaults),
                structure_guard(call.parts),
                *_modules(tracer.root),
            ),
            value_guards=(),
            undo=Mutations(),
            changes=Mutations(),
            has_regions=regions is not None and regions.has_changed,
            result=tracer.result,
            mutations=(),
            is_single=tracer.is_single,
            outside={},
        )
    )
    return captured


def _modules(root: torch.nn.Module) -> list[g.Guard]:
    return module_guards([(path, m, m.training) for path, m in root.named_modules()])
