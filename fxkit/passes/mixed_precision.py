"""Compute products in a lower precision, with fewer casts than autocast makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from fxkit.analysis.dependencies import EffectOrder
from fxkit.analysis.effects import effects_of
from fxkit.ir.attributes import Attribute, find_attribute
from fxkit.ir.op import Call, resolve
from fxkit.ir.session import EditSession
from fxkit.ir.types import TensorType, set_type, type_of
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.decomposition.fake_runs import type_under, without_autocast
from fxkit.passes.layers.casts import cast_results_back, insert_cast, result_types
from fxkit.passes.options import check_at_least, check_lower_precision
from fxkit.torch_adapters.fx_nodes import is_erased

# Where the time goes, and where a product of rounded operands is summed in float32 anyhow.
_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in """
    linear matmul mm bmm addmm baddbmm addbmm conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d convolution scaled_dot_product_attention
    """.split()
)

# What loses digits or overflows in a lower precision: sums over many elements, powers, logarithms,
# losses. Softmax and the normalisations are not here: their kernels compute in float32 inside.
_SENSITIVE = frozenset(
    f"aten.{name}"
    for name in """
    sum mean prod var std var_mean std_mean cumsum cumprod logcumsumexp logsumexp norm
    linalg_vector_norm dist cdist pdist renorm exp expm1 exp2 log log2 log10 log1p pow rsqrt
    reciprocal tan sinh cosh acos asin erfinv softplus atan2 cosine_similarity cosine_embedding_loss
    cross_entropy_loss nll_loss nll_loss_nd nll_loss2d kl_div l1_loss smooth_l1_loss huber_loss
    mse_loss binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss
    margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss poisson_nll_loss
    ctc_loss
    """.split()
)


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Cast the operands of products to a lower precision, and compute what is delicate in float32.

    Beside `torch.autocast`: a value is cast once for all products that take it, and not at all when
    it was cast up from the lower precision before; in eval mode weights are cast ahead, so that no
    call casts them again; sums, powers, logarithms and losses of values in the lower precision are
    computed in float32; products stay in float32 where it costs less than the casts around them.
    What the program puts inside of `torch.autocast(...)`, switched on or off, is left to it.

    Rewrites:
        %q = aten.linear(%x, self.q.weight); %k = aten.linear(%x, self.k.weight); return [%q, %k]
            →  %x_b = aten.to(%x, bf16); %q = aten.linear(%x_b, self.q_weight_bf16)
               %k = aten.linear(%x_b, self.k_weight_bf16); return [aten.to(%q, f32), ...]

    Attributes:
        dtype: The lower precision: bfloat16 or float16.
        freeze_weights: Whether parameters and buffers are cast ahead; such copies do not follow
            later changes of the weights, and take no gradient. Left out: in eval mode, of weights
            that need no gradient or when the pass runs under `torch.no_grad()`.
        min_elements: Fewest elements of the larger operand of a product worth a cast.
        keep_output_types: Whether results are cast back to the dtypes they had.
        where: Tells which products are cast, by their nodes; all when left out.
    """

    dtype: torch.dtype = torch.bfloat16
    freeze_weights: bool | None = None
    min_elements: int = 0
    keep_output_types: bool = True
    where: Callable[[fx.Node], bool] | None = None

    requires: ClassVar[tuple[str, ...]] = ("shapes_known",)
    numerics: ClassVar[str] = "changed"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_lower_precision(self)
        check_at_least(self, "min_elements", 0)

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear; changed nodes run on fake tensors once."""
        wanted = result_types(edit)
        lowerer = _Lowerer(edit, context, self)
        for node in list(edit.graph.nodes):
            if node.op.startswith("call_"):
                lowerer.visit(node)
        if self.keep_output_types:
            cast_results_back(edit, wanted)
        lowerer.erase_unused_reads()


@dataclass
class _Lowerer:
    edit: EditSession
    context: PassContext
    options: MixedPrecision
    order: EffectOrder = field(init=False)
    depth: int = 0
    changed: set[fx.Node] = field(default_factory=set)
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)
    frozen: dict[tuple[int, torch.dtype], str] = field(default_factory=dict)
    reads: list[fx.Node] = field(default_factory=list)
    stands_for: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = EffectOrder(self.edit.graph)
        self.known = set(self.edit.graph.nodes)
        self.has_modes = any(effects_of(n).is_global for n in self.order.aliases.effectful)

    def _freezes(self, weight: torch.Tensor) -> bool:
        wanted = self.options.freeze_weights
        if wanted is not None:
            return wanted
        is_learning = torch.is_grad_enabled() and weight.requires_grad
        return not self.edit.gm.training and not is_learning

    def visit(self, node: fx.Node) -> None:
        call = resolve(node)
        if call is None or self._enters_or_leaves(call):
            return
        with self.edit.on_behalf_of([node], "mixed_precision"):
            if self.depth == 0 and call.name in _PRODUCTS and self._is_worth(node, call):
                node = self._cast_operands(node, call, self.options.dtype)
            elif self.depth == 0 and (call.name in _SENSITIVE or self._is_left(node, call)):
                node = self._cast_operands(node, call, torch.float32)
            self._retype(node)

    def erase_unused_reads(self) -> None:
        """Erase the reads of weights that only products took."""
        for read in self.reads:
            if not is_erased(read) and not read.users:
                self.edit.erase(read)

    def _enters_or_leaves(self, call: Call) -> bool:
        name = call.name.rpartition(".")[2]
        self.depth += (name == "_enter_autocast") - (name == "_exit_autocast")
        return name in ("_enter_autocast", "_exit_autocast")

    def _is_worth(self, node: fx.Node, call: Call) -> bool:
        if self.options.where is not None and not self.options.where(node):
            return False
        types = [self._operand_type(value) for value in call.arguments.values()]
        floating = [t for t in types if isinstance(t, TensorType) and t.dtype.is_floating_point]
        if any(t.dtype not in (torch.float32, self.options.dtype) for t in floating):
            self.context.notes.append(f"%{node.name} stays: it takes another dtype than float32")
            return False
        largest = max((t.numel for t in floating), default=0)
        return bool(floating) and largest >= self.options.min_elements

    def _is_left(self, node: fx.Node, call: Call) -> bool:
        """Tell whether a product that is not cast would take operands that are."""
        if call.name not in _PRODUCTS:
            return False
        types = [self._operand_type(value) for value in call.arguments.values()]
        dtypes = {t.dtype for t in types if isinstance(t, TensorType)}
        is_mixed = {torch.float32, self.options.dtype} <= dtypes
        return is_mixed or any(operand in self.changed for operand in node.all_input_nodes)

    def _operand_type(self, value: Any) -> Any:
        if isinstance(value, Attribute):
            return TensorType.of(find_attribute(self.edit.gm, value.path))
        return type_of(value) if isinstance(value, fx.Node) else None

    # Casting.

    def _cast_operands(self, node: fx.Node, call: Call, dtype: torch.dtype) -> fx.Node:
        def cast(operand: fx.Node) -> fx.Node:
            known = type_of(operand)
            source = (torch.float32, self.options.dtype)
            if not isinstance(known, TensorType) or known.dtype not in source:
                return operand
            return operand if known.dtype == dtype else self._cast(operand, dtype, node)

        if node.op == "call_module":
            is_same = dtype == torch.float32 and all(cast(o) is o for o in node.all_input_nodes)
            return node if is_same else self._as_function(node, call, cast)
        args, kwargs = map_arg(node.args, cast), map_arg(node.kwargs, cast)
        if (args, kwargs) != (node.args, node.kwargs):
            self.edit.set_args(node, args, kwargs)
        return node

    def _as_function(self, node: fx.Node, call: Call, cast: Any) -> fx.Node:
        """Replace a called module by its operator, with the casts."""
        arguments: dict[str, Any] = {}
        for name, value in call.arguments.items():
            arguments[name] = self._read(value, node) if isinstance(value, Attribute) else value
        filled: Mapping[str, Any] = map_arg(arguments, cast)
        new = self.edit.insert(
            "call_function", call.operator.overload, (), dict(filled), before=node
        )
        set_type(new, type_of(node))
        self.edit.replace(node, new)
        self.stands_for[new] = node
        return new

    def _read(self, attribute: Attribute, before: fx.Node) -> fx.Node:
        read = self.edit.get_attr(attribute.path, before=before)
        set_type(read, TensorType.of(find_attribute(self.edit.gm, attribute.path)))
        self.reads.append(read)
        return read

    def _cast(self, operand: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node:
        """Return a value in another precision: from before, from where it came, or cast here."""
        origin = self._origin(operand, dtype)
        if origin is not None:
            return origin
        frozen = self._frozen(operand, dtype, user)
        if frozen is not None:
            return frozen
        if self.has_modes or self._is_written(operand):
            return insert_cast(self.edit, operand, dtype, before=user)
        if (operand, dtype) not in self.casts:
            self.casts[operand, dtype] = insert_cast(self.edit, operand, dtype, before=user)
        return self.casts[operand, dtype]

    def _origin(self, operand: fx.Node, dtype: torch.dtype) -> fx.Node | None:
        """Return the value of the wanted dtype that was cast up to this one."""
        call = resolve(operand)
        if call is None or call.name != "aten.to" or not operand.all_input_nodes:
            return None
        source = operand.all_input_nodes[0]
        known, now = type_of(source), type_of(operand)
        is_wider = isinstance(known, TensorType) and known.dtype == dtype != torch.float32
        if not is_wider or now.device != known.device:
            return None
        return None if self._is_written(source) or self._is_written(operand) else source

    def _is_written(self, node: fx.Node) -> bool:
        """Tell whether anybody writes to the memory of a node; casts made here are only read."""
        original = self.stands_for.get(node, node)
        return original in self.known and self.order.aliases.is_written(original)

    def _frozen(self, operand: fx.Node, dtype: torch.dtype, user: fx.Node) -> fx.Node | None:
        """Return a read of a weight's copy that was cast ahead, if weights are frozen."""
        if operand.op != "get_attr":
            return None
        tensor = find_attribute(self.edit.gm, str(operand.target))
        if not isinstance(tensor, torch.Tensor) or self._is_written(operand):
            return None
        if not self._freezes(tensor):
            return None
        key = (id(tensor), dtype)
        if key not in self.frozen:
            name = f"{operand.target}_{str(dtype).removeprefix('torch.')}"
            self.frozen[key] = self.edit.register(name, tensor.detach().to(dtype))
        self.reads.append(operand)
        read = self.edit.get_attr(self.frozen[key], before=user)
        set_type(read, TensorType.of(find_attribute(self.edit.gm, self.frozen[key])))
        return read

    def _retype(self, node: fx.Node) -> None:
        """Work out the type of a node whose operands got others."""
        call = resolve(node)
        touched = call is not None and (call.name in _PRODUCTS or call.name in _SENSITIVE)
        if not touched and not any(o in self.changed for o in node.all_input_nodes):
            return
        before, now = type_of(node), type_under(node, without_autocast())
        if now is None and call is not None:
            node = self._cast_operands(node, call, torch.float32)
            now = type_under(node, without_autocast())
        if now is None:
            self.context.notes.append(f"%{node.name} keeps the type it had: it runs on no fakes")
        elif now != before:
            set_type(node, now)
            self.changed.add(node)
