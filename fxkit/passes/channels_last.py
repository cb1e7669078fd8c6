"""Keep images with their channels innermost, in which convolutions run fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fxkit.ir.session import EditSession
from fxkit.passes.base import Pass, PassContext
from fxkit.passes.layout.layout_propagation import LayoutPropagation


@dataclass(frozen=True)
class ChannelsLast(Pass):
    """Lay out the weights of 2d convolutions, and what they convolve, with channels innermost.

    Weights are converted once and kept as new parameters, so that what is learnt or loaded
    afterwards into the old ones is not seen: for inference only. Images are converted in front of
    the first convolution; what is computed from them keeps their layout, as torch's operators do.
    It is brought back to what it was where it leaves the graph, where an operator needs it (`view`)
    or tells it (`as_strided`, `stride`), where random numbers are drawn in the order of memory, and
    in front of calls of which nothing is known.

    Nothing is changed where no type is known, where the images have gaps, or where bringing back
    would part a view from the tensor that is written through it.

    Rewrites:
        %c = aten.conv2d(%x, self.w); return aten.relu(%c)
            →  %l = aten.contiguous(%x, channels_last); %c = aten.conv2d(%l, self.c_weight);
               %r = aten.relu(%c); return aten.contiguous(%r)
    """

    numerics: ClassVar[str] = "close"

    def apply(self, edit: EditSession, context: PassContext) -> None:
        """Visit the nodes in order. Cost: linear in the edges, and in the weights."""
        LayoutPropagation(edit).visit_all(context)
