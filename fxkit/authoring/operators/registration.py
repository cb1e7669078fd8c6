"""Registering an authored operator with torch: schema, fake, kernels, autograd, vmap, autocast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxkit.authoring.operators.calling import Calls, DifferentiableCall
from fxkit.authoring.operators.composed import composed
from fxkit.authoring.operators.definition import Definition
from fxkit.authoring.operators.dtype_promotion import dtypes_of, result_dtype
from fxkit.authoring.operators.eager_kernels import EagerKernels
from fxkit.authoring.operators.evaluation import kind_of_dtype
from fxkit.authoring.operators.forward_mode import tangents_of
from fxkit.authoring.operators.kernel_form import results_like, row_of_definition
from fxkit.authoring.operators.row_form import row_op_of_definition
from fxkit.errors import UnsupportedError
from fxkit.ir.compositions import declare_composition
from fxkit.lower.loop_ir.bits import Number
from fxkit.lower.operators import reduction_table, scalar_table
from fxkit.torch_adapters.decompositions import declare_decomposition, withdraw_decomposition
from fxkit.torch_adapters.operator_derivatives import register_derivatives
from fxkit.torch_adapters.operators import refuse_calls


class Registration:
    """An operator as torch knows it; it is registered as long as this object lives.

    Args:
        definition: What it computes.
        namespace: The namespace of `torch.ops` that has it.
        tolerance: Largest difference of a kernel from torch's composition; see `ScalarOp`.

    Attributes:
        overload: The operator, as graphs call it.
        kernels: Its kernels in eager calls.
        calls: Calls it on arguments that are complete.
    """

    def __init__(self, definition: Definition, namespace: str, tolerance: float) -> None:
        self.definition = definition
        self.namespace = namespace
        self.tolerance = tolerance
        self.kernels = EagerKernels(definition)
        parameters = enumerate(definition.parameters)
        self._places = [place for place, parameter in parameters if parameter.is_tensor]
        self._gradients: dict[str, Registration] = {}
        self.calls = Calls(self, self._call)
        self._library = self._registered()
        self.overload = getattr(getattr(torch.ops, namespace), definition.name).default
        row_name = f"{namespace}.{definition.name}"
        if definition.rows is None:
            scalar_table.TABLE[row_name] = row_of_definition(definition, row_name, tolerance)
        elif (row := row_op_of_definition(definition, row_name, tolerance)) is not None:
            reduction_table.TABLE[row_name] = row
        declare_composition(self.overload, self.composition)
        declare_decomposition(self.overload, self.core_composition, self._fake)

    @property
    def qualified_name(self) -> str:
        """The operator's name as torch spells it."""
        return f"{self.namespace}::{self.definition.name}"

    def gradient(self, by: str) -> Registration:
        """Return the operator that computes the gradient with respect to an operand."""
        if by not in self._gradients:
            definition = self.definition.gradient(by)
            self._gradients[by] = Registration(definition, self.namespace, self.tolerance)
        return self._gradients[by]

    def composition(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator by those of torch that it is defined by."""
        return self._composed(args, kwargs, by_core=False)

    def core_composition(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator by core operators of torch."""
        return self._composed(args, kwargs, by_core=True)

    def _composed(self, args: Sequence[Any], kwargs: Mapping[str, Any], by_core: bool) -> Any:
        names = [p.name for p in self.definition.parameters]
        given = {**self.definition.numbers, **dict(zip(names, args, strict=False)), **kwargs}
        tensors, numbers = self._parted([given[name] for name in names])
        return self._returned(composed(self.definition, tensors, numbers, by_core))

    def withdraw(self) -> None:
        """Take the operator, and its gradients, out of torch again."""
        for gradient in self._gradients.values():
            gradient.withdraw()
        for table in (scalar_table.TABLE, reduction_table.TABLE):
            table.pop(f"{self.namespace}.{self.definition.name}", None)
        withdraw_decomposition(self.overload)
        self._library._destroy()
        refuse_calls(self.overload, self._refused)

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"expected the newest definition of {self.qualified_name}, got an earlier one",
            hint="call what was defined last, or give each a name of its own by name=",
        )

    def _registered(self) -> torch.library.Library:
        library = torch.library.Library(self.namespace, "FRAGMENT")
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.pointwise)
        library.define(self.definition.schema, tags=tags)
        name, qualified = self.definition.name, self.qualified_name
        for key in ("CPU", "CUDA"):
            library.impl(name, self._run, key)
        torch.library.register_fake(qualified, self._fake, lib=library)
        overload = getattr(getattr(torch.ops, self.namespace), name).default
        register_derivatives(library, overload, self._backward, self.save, self._tangents)
        torch.library.register_vmap(qualified, self._mapped, lib=library)
        return library

    def _parted(self, args: Sequence[Any]) -> tuple[list[torch.Tensor], dict[str, Number]]:
        """Part arguments into operands and numbers; defaults stand for those left out."""
        given = dict(zip((p.name for p in self.definition.parameters), args, strict=False))
        numbers = {n: given.get(n, d) for n, d in self.definition.numbers.items()}
        return [given[name] for name in self.definition.tensors], numbers

    def _returned(self, results: Sequence[torch.Tensor]) -> Any:
        return tuple(results) if self.definition.is_tuple else results[0]

    def _run(self, *args: Any) -> Any:
        return self._returned(self.kernels.call(*self._parted(args)))

    def _fake(self, *args: Any) -> Any:
        return self._returned(results_like(self.definition, *self._parted(args)))

    # Autograd.

    def operands(self, arguments: Sequence[Any]) -> list[Any]:
        """Return those of all arguments that are operands."""
        return [arguments[place] for place in self._places]

    def differentiable(self, arguments: Sequence[Any]) -> Any:
        """Call it on arguments that are complete, so that gradients can be asked for."""
        return DifferentiableCall.apply(self, *arguments)

    def undifferentiated(self, *arguments: Any) -> Any:
        """Call it on arguments that are complete, where gradients are off."""
        return self.calls.fast(*arguments)

    def save(self, ctx: Any, inputs: Sequence[Any], output: Any = None) -> None:
        """Keep what gradients are computed from."""
        _, ctx.numbers = self._parted(inputs)
        ctx.save_for_backward(*self.operands(inputs))

    def gradients(
        self,
        saved: Sequence[torch.Tensor],
        numbers: Mapping[str, Number],
        needed: Sequence[bool],
        grads: Sequence[torch.Tensor],
    ) -> tuple[Any, ...]:
        """Return the gradient of each argument.

        Args:
            saved: The operands.
            numbers: The other arguments, by their names.
            needed: Of which arguments it is asked for; those left to their defaults may lack.
            grads: The gradients of the results.
        """
        given = {**dict(zip(self.definition.tensors, saved, strict=True)), **numbers}
        arguments = [given[p.name] for p in self.definition.parameters]
        pairs = zip(needed, self.definition.parameters, strict=False)
        return tuple(
            self._gradient_of(p.name, grads, arguments, given[p.name])
            if is_needed and p.is_tensor
            else None
            for is_needed, p in pairs
        )

    def _backward(self, ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return self.gradients(ctx.saved_tensors, ctx.numbers, ctx.needs_input_grad, grads)

    def _call(self, *arguments: Any) -> Any:
        return self.calls.run(arguments, {}, list(arguments))

    def _tangents(self, ctx: Any, args: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return tangents_of(self, ctx, args, tangents)

    def _gradient_of(
        self, by: str, grads: Sequence[torch.Tensor], arguments: Sequence[Any], like: torch.Tensor
    ) -> torch.Tensor:
        slope = self.gradient(by).calls.fast(*grads, *arguments)
        slope = slope if slope.shape == like.shape else slope.sum_to_size(like.shape)
        return slope if slope.dtype == like.dtype else slope.to(like.dtype)

    # vmap.

    def _mapped(self, info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        tensors, numbers = self._parted(args)
        named = zip((p.name for p in self.definition.parameters), in_dims, strict=False)
        dims = dict(named)
        batched = self._batched(tensors, [dims[n] for n in self.definition.tensors])
        found = self._called(batched, numbers)
        return found, tuple(0 for _ in found) if self.definition.is_tuple else 0

    def _batched(
        self, tensors: Sequence[torch.Tensor], dims: Sequence[int | None]
    ) -> list[torch.Tensor]:
        """Return operands with the mapped dimension first, aligned for broadcasting."""
        pairs = list(zip(tensors, dims, strict=True))
        single = [t if dim is None else t.select(dim, 0) for t, dim in pairs]
        rows = self.definition.rows
        names = self.definition.tensors
        missing = [rows is not None and name not in rows for name in names]
        rank = max(t.ndim + lacks for t, lacks in zip(single, missing, strict=True))
        dtypes = dtypes_of(single)
        found: list[torch.Tensor] = []
        for (tensor, dim), one, lacks in zip(pairs, single, missing, strict=True):
            if not one.ndim and rank and dim is not None:
                # What had no dimension now has one, but is to count no more than before.
                tensor = tensor.to(result_dtype(kind_of_dtype(tensor.dtype), dtypes))
            if dim is not None:
                tensor = tensor.movedim(dim, 0)
                shape = (tensor.shape[0], *(1,) * (rank - lacks - one.ndim), *tensor.shape[1:])
                tensor = tensor.reshape(shape)
            found.append(tensor)
        return found

    def _called(self, tensors: Sequence[torch.Tensor], numbers: Mapping[str, Number]) -> Any:
        given = {**dict(zip(self.definition.tensors, tensors, strict=True)), **numbers}
        return self.overload(*[given[p.name] for p in self.definition.parameters])
