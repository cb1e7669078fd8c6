"""`fxkit.kernel`: a pattern, and a kernel of the user's own for the places where it occurs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxkit.authoring.kernels.arguments import KernelArguments, arguments_of
from fxkit.authoring.kernels.conversions import with_dtypes
from fxkit.authoring.kernels.native import NativeKernel
from fxkit.authoring.kernels.native_call import AuthoredCall, make_call
from fxkit.authoring.kernels.option_checks import check_computed, check_operands, check_options
from fxkit.authoring.kernels.proof import prove_kernel
from fxkit.authoring.kernels.references import reference_of
from fxkit.authoring.kernels.registration import register_operator
from fxkit.authoring.kernels.signature import read_signature
from fxkit.authoring.kernels.source import KernelSource, library_source, read_source
from fxkit.errors import NumericsError, UnsupportedError
from fxkit.ir.types import TensorType, type_of
from fxkit.lower.compiling.native_operators import call_natively
from fxkit.lower.runtime.kernel_call import stores_its_values
from fxkit.patterns.language import Operand, operand
from fxkit.patterns.match_results import Match
from fxkit.patterns.pattern_nodes import Pattern
from fxkit.patterns.rewriting import Rule, Template, Where, check_sides, conditions_of
from fxkit.patterns.templates import pattern as pattern_of

DTYPES = (torch.float32, torch.float64)


class AuthoredKernel:
    """A kernel of the user's own; made by `kernel`.

    It can be called like the pattern: then the kernel runs, or the pattern where it does not serve.

    Attributes:
        name: What reports call it.
        pattern: What it computes.
        reference: The pattern as a function of torch.
        natives: Kind of device → the kernel there, where there is a source.
        call: A function or operator of torch that computes it, where there is no source.
        always: Whether it is used without a trial.
        operator: The operator of torch that is its node in graphs.
        rule: Puts that operator in the place of the pattern.
        gradient: Computes its gradient, where it claims one.
        where: Where it applies, as the user said it.
        devices: The kinds of devices that `call` serves.
        with_epilogues: The kernel with what follows it at places of graphs: operators and sources.
    """

    def __init__(
        self,
        name: str,
        found: Pattern,
        reference: Callable[..., Any],
        natives: Mapping[str, NativeKernel],
        call: Callable[..., Any] | None,
        captures: Sequence[tuple[str, type]],
        gradient: Callable[..., Any] | None,
        always: bool,
        options: dict[str, Any],
    ) -> None:
        self.name = name
        self.pattern = found
        self.reference = reference
        self.natives: Mapping[str, NativeKernel] = dict(natives)
        self.call = call
        self.always = always
        self.gradient = gradient
        self.where = options["where"]
        self.captures = tuple(captures)
        self.devices = options.pop("devices")
        results = len(found.outputs)
        self.operator = register_operator(name, captures, results, self._run, reference, gradient)
        self.rule = self._rule(options)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._signature = inspect.Signature([inspect.Parameter(n, kind) for n, _ in captures])
        self.with_epilogues: dict[Any, tuple[Any, NativeKernel]] = {}
        if "cpu" in self.natives:
            call_natively(self.operator, self._native_call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the pattern, by the kernel where it serves."""
        values = args
        if kwargs or len(args) != len(self.captures):
            try:
                values = tuple(self._signature.bind(*args, **kwargs).arguments.values())
            except TypeError as error:
                raise TypeError(f"{self.name}{self._signature}: {error}") from None
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        asks = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if asks and self.gradient is None:
            return self.reference(*values)
        return self.operator(*values)

    @property
    def has_hook(self) -> bool:
        """Whether what follows it on the processor may be fused with it."""
        return "cpu" in self.natives and self.natives["cpu"].arguments.has_hook

    def serves(self, device: str) -> bool:
        """Tell whether it has a source, or a function, for a kind of device."""
        return device in (self.natives if self.call is None else self.devices)

    def prove(self, device: str = "cpu", *, seed: int = 0, checked: bool = False) -> int:
        """Hold the kernel to its pattern, on inputs made for that.

        Values, shapes, dtypes, strides and writes are compared over the dtypes that it takes, odd
        sizes, broadcasting, layouts, empty tensors, NaN, Inf and signed zeros, and the gradient
        where it claims one. A C++ source runs in a process of its own, with guards around memory.

        Args:
            device: Where it runs.
            seed: Seed of the random numbers.
            checked: Build the C++ source with the compiler's sanitizers, which tell the line where
                it leaves its memory.

        Returns:
            How many inputs were compared.

        Raises:
            NumericsError: With the inputs, where the two differ, or the kernel serves none.
            BuildError: When the source does not build.
            UnsupportedError: When a checked build is asked for, and there is no sanitizer.
        """
        return prove_kernel(self, device, seed=seed, checked=checked)

    def __repr__(self) -> str:
        return f"<fxkit kernel {self.name}>"

    def _native_call(self, values: Sequence[Any]) -> AuthoredCall | None:
        return make_call(self.natives["cpu"], self.operator, values)

    def _run(self, *values: Any) -> Any:
        """Compute the operator."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if self.call is not None and tensors[0].device.type in self.devices:
            return self._called(*values)
        native = self.natives.get(tensors[0].device.type)
        if native is None or not all(map(_is_plain, tensors)):
            return self.reference(*values)
        return native(*values)

    def _called(self, *values: Any) -> Any:
        """Compute the operator by the user's own function."""
        assert self.call is not None
        made, wanted = self.call(*values), len(self.pattern.outputs)
        results = made if isinstance(made, (tuple, list)) else (made,)
        if len(results) != wanted or not all(isinstance(r, torch.Tensor) for r in results):
            raise NumericsError(
                f"expected {self.name} to return {wanted} tensor(s), got "
                f"{', '.join(type(r).__name__ for r in results)}",
                hint="what call= returns are the pattern's results, in its order",
            )
        return tuple(results) if wanted > 1 else results[0]

    def _rule(self, options: dict[str, Any]) -> Rule:
        """Return the rule that puts the operator in the place of the pattern."""
        operands, where = conditions_of([self._refusal, *_listed(options.pop("where"))])
        numbers = {n: _number(kind) for n, kind in self.captures if kind is not torch.Tensor}
        graph = fx.Graph()
        taken = {name: graph.placeholder(name) for name in self.pattern.captures}
        node = graph.call_function(self.operator, tuple(taken[n] for n, _ in self.captures))
        count = len(self.pattern.outputs)
        parts = range(count) if count > 1 else ()
        values = tuple(graph.call_function(getitem, (node, part)) for part in parts) or (node,)
        graph.output(values)
        found = replace(with_dtypes(self.pattern), operands={**numbers, **operands})
        template = Template(graph, values)
        check_sides(found, template)
        return Rule(self.name, found, template, where, **options)

    def _refusal(self, match: Match) -> bool | str:
        """Accept a match whose operands the kernel takes, or say why it does not."""
        types = [match.type(name) for name, _ in self.captures]
        tensors = [known for known in types if isinstance(known, TensorType)]
        if self.gradient is None:
            asking = [n for n in match.outputs if getattr(type_of(n), "requires_grad", False)]
            if asking:
                return f"%{asking[0].name} asks for a gradient, and {self.name} has none"
        device = tensors[0].device.type
        if self.call is not None:
            return device in self.devices or f"{self.name} does not run on {device}"
        native = self.natives.get(device)
        if native is None:
            return f"{self.name} has no source for {device}"
        if any(known.is_symbolic or known.stride is None for known in tensors):
            return "sizes are not known"
        values = [match[n] if k is not torch.Tensor else t
                  for (n, k), t in zip(self.captures, types, strict=True)]  # fmt: skip
        return native.objection(values) or True


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and stores_its_values(tensor)


def _listed(where: Any) -> list[Any]:
    if where is None:
        return []
    return list(where) if isinstance(where, (list, tuple)) else [where]


def _number(kind: type) -> Operand:
    """Return what a number of the pattern has to be."""
    kinds = {float: (float, int), int: (int,), bool: (bool,)}[kind]

    def accepts(value: Any) -> bool:
        return isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)

    return operand(value=accepts)


def kernel(
    pattern: Callable[..., Any] | Pattern,
    *,
    cpp: str | Path | None = None,
    cuda: str | Path | None = None,
    library: str | Path | None = None,
    signature: str | None = None,
    call: Callable[..., Any] | None = None,
    devices: Sequence[str] = ("cpu", "cuda"),
    function: str | None = None,
    name: str | None = None,
    where: Where | Mapping[str, Operand] | Sequence[Any] | None = None,
    results: Sequence[str] | None = None,
    numbers: Mapping[str, Callable[..., float | int]] | None = None,
    workspace: int | Callable[..., int] = 0,
    dtypes: Sequence[torch.dtype] = DTYPES,
    gradient: Callable[..., Any] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    flags: Sequence[str] = (),
    always: bool = False,
    exact: bool = False,
    finite_only: bool = False,
    commute: bool = True,
    benefit: int = 1,
) -> AuthoredKernel:
    """Bring a kernel of your own for the places of a graph where a pattern occurs.

    `fxkit.compile(model, kernels=[it])` finds these places. Before the kernel is used it is held to
    its pattern in a process of its own, and at each place it is timed against the kernels that
    fxkit makes there: the faster one stays, and the report says so.

    What a parameter of the function is given follows from its name: a pointer named like a
    parameter of the pattern is that operand; pointers to what is not const are the results. Of each
    there are `x_sizes`, `x_strides`, `x_size_0`, `x_size_last`, `x_stride_0`, `x_numel` and
    `x_rank`; there are `workspace`, `threads` and, for CUDA, `stream`. A number named like a
    parameter of the pattern is one that the pattern binds. Operands lie row by row unless the
    function takes their strides.

    Args:
        pattern: Computes by torch what the kernel does; a function as `fxkit.rule` takes it.
        cpp: A C++ source: its path, from the file that calls this, or its text.
        cuda: A CUDA source, whose function launches kernels on its `stream`.
        library: In the place of a C++ source a library that is there already: its path.
        signature: The function in it, as C declares it.
        call: In the place of a source an operator of torch, or a Python function, of the pattern's
            parameters.
        devices: The kinds of devices that `call` serves; `("cuda",)` where it launches a kernel of
            Triton.
        function: Name of the source's function, where there are several.
        name: What reports call the kernel.
        where: Where it applies, as `fxkit.rule` takes it.
        results: Names of the pointers to results, where their order is not that of the pattern.
        numbers: Name of a parameter → a function that computes it from operands and results, of
            which it sees shapes, strides and dtypes, by their names.
        workspace: Bytes of workspace, or a function that computes them as `numbers` are.
        dtypes: What the type parameter of a template may be.
        gradient: Returns the gradients of the operands from those of the results, then the
            pattern's parameters. Without it the kernel is not used where gradients are asked for.
        samples: For the proof, as `fxkit.rule` takes them: shapes, constants, or tensors where
            their numbers matter.
        flags: More flags for the compiler.
        always: Whether it is used without a trial.
        exact: Whether it gives the very same numbers as the pattern.
        finite_only: Whether it may differ where an operand is NaN or infinite.
        commute: Try the operands of commutative operators in both orders.
        benefit: Preference over other kernels at the same node.

    Raises:
        UnsupportedError: When a source is not there or its signature is not plain, with the line.
        PatternError: When the pattern can't be traced.

    Example:
        >>> import torch, fxkit
        >>> source = '''
        ... #include <cstdint>
        ... void double_plus(const float* x, const float* y, float* out, int64_t out_numel) {
        ...   for (int64_t i = 0; i < out_numel; ++i) out[i] = 2 * x[i] + y[i];
        ... }'''
        >>> double_plus = fxkit.kernel(
        ...     lambda x, y: x * 2 + y,
        ...     cpp=source,
        ...     where=lambda match: match.type("x").shape == match.type("y").shape,
        ... )
        >>> double_plus(torch.ones(3), torch.ones(3))
        tensor([3., 3., 3.])
    """
    folder = _folder_of_caller()
    found = pattern_of(pattern)
    check_options(
        found.captures,
        texts={"cpp": cpp, "cuda": cuda, "library": library, "signature": signature, "name": name,
               "function": function},
        functions={"call": call, "gradient": gradient},
        numbers={} if numbers is None else numbers,
        workspace=workspace,
        dtypes=dtypes,
        samples=samples,
        flags=flags,
        devices=devices,
    )  # fmt: skip
    sources = {
        device: read_source(given, folder, is_cuda=device == "cuda", flags=tuple(flags))
        for device, given in (("cpu", cpp), ("cuda", cuda))
        if given is not None
    }
    if library is not None:
        if signature is None or cpp is not None:
            raise UnsupportedError(
                f"expected the signature of a function in {library!s}, and no cpp=, got "
                f"{'none' if signature is None else 'both'}",
                hint='write signature="void f(const float* x, float* out, int64_t x_numel)"',
            )
        sources["cpu"] = library_source(library, folder, signature)
    if (call is None) == (not sources):
        raise UnsupportedError(
            f"expected a source or call= for a kernel, got {'both' if sources else 'none'}",
            hint="pass cpp=, cuda= or library=, or an operator of torch as call=",
        )
    given_arguments = {
        device: _arguments(source, found, function, name, results, numbers or {})
        for device, source in sources.items()
    }
    for device, arguments in given_arguments.items():
        check_computed(arguments, numbers or {}, workspace, sources[device].place)
    reference = reference_of(pattern, found)  # type: ignore[arg-type]
    natives = {
        device: NativeKernel(
            sources[device],
            arguments,
            tuple(dtypes),
            dict(numbers or {}),
            workspace,
            reference,
            found.captures,
        )
        for device, arguments in given_arguments.items()
    }
    shown = name or _name_of(pattern, natives)
    options: dict[str, Any] = {
        "where": where, "exact": exact, "finite_only": finite_only, "commute": commute,
        "benefit": benefit, "samples": tuple(samples), "file": _file_of(pattern),
        "devices": tuple(devices),
    }  # fmt: skip
    captures = _captures(found, list(given_arguments.values()), pattern)
    check_operands(captures, {d: sources[d].place for d in sources}, given_arguments)
    return AuthoredKernel(
        shown, found, reference, natives, call, captures, gradient, always, options
    )


def _arguments(
    source: KernelSource,
    found: Pattern,
    function: str | None,
    name: str | None,
    results: Sequence[str] | None,
    numbers: Mapping[str, Any],
) -> KernelArguments:
    stem = source.path.stem if source.path is not None else None
    others = [n for n in (name, stem, found.name) if n is not None and n.isidentifier()]
    signature = read_signature(source.text, function, others, source.place, source.lines_before)
    return arguments_of(
        signature, found.captures, results, len(found.outputs), numbers, source.place
    )


def _captures(
    found: Pattern, arguments: Sequence[KernelArguments], pattern: Any
) -> list[tuple[str, type]]:
    """Return the pattern's parameters with their kinds: tensors, or numbers."""
    if arguments:
        first = arguments[0]
        return [
            (n, torch.Tensor if n in first.operands else first.kind_of(n)) for n in found.captures
        ]
    told = inspect.get_annotations(pattern, eval_str=True) if callable(pattern) else {}
    kinds = {n: told[n] for n in found.captures if told.get(n) in (float, int, bool)}
    return [(n, kinds.get(n, torch.Tensor)) for n in found.captures]


def _name_of(pattern: Any, natives: Mapping[str, NativeKernel]) -> str:
    own = getattr(pattern, "__name__", "")
    if own.isidentifier():
        return own
    first = next(iter(natives.values()), None)
    return "kernel" if first is None else first.arguments.signature.name


def _folder_of_caller() -> Path:
    """Return the folder of the file that calls `kernel`, or the current one."""
    file = Path(sys._getframe(2).f_code.co_filename)
    return file.parent if file.is_file() else Path()


def _file_of(pattern: Any) -> str:
    try:
        return inspect.getsourcefile(pattern) or ""
    except TypeError:
        return ""
