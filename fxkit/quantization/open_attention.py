"""Calls of torch's attention become the calls that it makes, so that its layers are layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from fxkit.ir.op import Call
from fxkit.passes.decomposition.decompositions import Decompose, Decomposition, Entry
from fxkit.passes.decomposition.for_kernels import ForKernels
from fxkit.quantization.operand_table import ATTENTION


class _Attention(ForKernels):
    """What `torch.nn.functional.multi_head_attention_forward` itself calls."""

    def entry(self, node: fx.Node, call: Call) -> Entry | None:
        """Return what puts the calls of an attention in its place."""
        return super().entry(node, call) if call.name.removeprefix("opaque.") == ATTENTION else None


@dataclass(frozen=True)
class OpenAttention(Decompose):
    """Call what `nn.MultiheadAttention` calls: its projections are linear layers like others.

    Rewrites:
        %y = torch.nn.functional.multi_head_attention_forward(%x, %x, %x, …, %in, %b, …, %out, %c)
            →  %p = aten.linear(%x, %in, %b); …; %y = aten.linear(%a, %out, %c)
    """

    table: ClassVar[type[Decomposition]] = _Attention
