"""What became of a lowered graph, region by region, and how its calls went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What the notes on a quantised graph say of such layers, and where a graph's `meta` has them.
STAYS = "stays in floating point"
FLOAT_LAYERS = "fxkit_float_layers"


@dataclass(frozen=True)
class Region:
    """What became of a group of nodes.

    Attributes:
        name: Name of the region.
        nodes: Names of its nodes, in graph order.
        kernel: Name of the kernel that computes them, or None when eager does.
        reason: Why eager computes them, in words; None for a fused region.
        bytes_saved: Bytes of memory traffic that the fusion saves; None when eager computes them.
    """

    name: str
    nodes: tuple[str, ...]
    kernel: str | None
    reason: str | None
    bytes_saved: int | None


@dataclass(frozen=True)
class KernelTrial:
    """What became of a user's kernel at a place where its pattern occurs, or of the kernel at all.

    Attributes:
        kernel: Its name.
        nodes: Names of the nodes that it computes, as in the captured graph; none where it was left
            out before any place was looked at.
        reason: Why it is left out; None where it is used.
        seconds: Of a call with the kernel, or None where none was timed.
        own_seconds: Of a call with the kernels that fxkit makes there.
        source: The user's line, where it is known.
        epilogue: Names of the nodes that follow, and that the kernel computes too.
    """

    kernel: str
    nodes: tuple[str, ...]
    reason: str | None
    seconds: float | None = None
    own_seconds: float | None = None
    source: str | None = None
    epilogue: tuple[str, ...] = ()

    @property
    def is_used(self) -> bool:
        """Whether the kernel computes these nodes."""
        return self.reason is None

    def __str__(self) -> str:
        times = ""
        if self.seconds is not None and self.own_seconds is not None:
            times = f"{self.seconds * 1e6:.1f} us, fxkit's kernels {self.own_seconds * 1e6:.1f} us"
        told = "; ".join(part for part in (times, self.reason) if part)
        told = told or "without a trial"
        at = f" at {', '.join(self.nodes)}" if self.nodes else ""
        at += f" with {', '.join(self.epilogue)} behind it" if self.epilogue else ""
        where = f" ({self.source})" if self.source else ""
        return f"{self.kernel} {'used' if self.is_used else 'left out'}{at}{where}: {told}"


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
        stand_ins: Runs of kernels that torch computed instead: one of them failed, as its function
            said, or a parameter was not of its type.
        tensor_ops: Names of the products, convolutions and attention, which kernels compute only
            where they are faster than torch's library.
        float_layers: Of a quantised graph, which layers are computed with floats all the same, and
            why: a sentence for each.
    """

    regions: tuple[Region, ...]
    build_seconds: float
    cache_hit: bool
    calls: int
    eager_calls: Mapping[str, int]
    kernel_misses: int
    stand_ins: int = 0
    tensor_ops: frozenset[str] = frozenset()
    trials: tuple[KernelTrial, ...] = ()
    float_layers: tuple[str, ...] = ()

    @property
    def fused(self) -> int:
        """Number of pointwise and normalising nodes in fused regions."""
        return self._count(is_tensor_op=False, is_fused=True)

    @property
    def candidates(self) -> int:
        """Number of pointwise and normalising nodes."""
        return self._count(is_tensor_op=False)

    @property
    def tensor_ops_in_kernels(self) -> int:
        """Number of products, convolutions and attention that kernels compute."""
        return self._count(is_tensor_op=True, is_fused=True)

    def _count(self, is_tensor_op: bool, is_fused: bool = False) -> int:
        names = (n for r in self.regions if r.kernel or not is_fused for n in r.nodes)
        return sum((name in self.tensor_ops) == is_tensor_op for name in names)

    def __str__(self) -> str:
        fused = [r for r in self.regions if r.kernel is not None]
        kernels = len({r.kernel for r in fused})
        kind = "found in the cache" if self.cache_hit else "built"
        share = f" ({self.fused / self.candidates:.1%})" if self.candidates else ""
        lines = [
            f"{self.fused} of {self.candidates} pointwise and normalising nodes fused{share} into "
            f"{len(fused)} regions, {kernels} kernels {kind} in {self.build_seconds:.3f} s",
            *self._tensor_ops_line(),
            f"{'region':<12} {'kernel':<11} {'nodes':>5} {'MB saved':>9}  members",
        ]
        for r in fused:
            saved = (r.bytes_saved or 0) / 1e6
            members = ", ".join(r.nodes)
            lines.append(f"{r.name:<12} {r.kernel:<11} {len(r.nodes):>5} {saved:>9.2f}  {members}")
        lines += [f"{r.name:<24} not fused: {r.reason}" for r in self.regions if r.reason]
        lines += [f"kernel {trial}" for trial in self.trials]
        lines += self.float_layers
        lines.append(f"calls: {self.calls} fused, {sum(self.eager_calls.values())} in eager")
        lines += [f"  in eager {n} times: {why}" for why, n in self.eager_calls.items()]
        if self.kernel_misses:
            lines.append(f"  {self.kernel_misses} calls of kernels ran in eager for their types")
        if self.stand_ins:
            lines.append(f"  torch stood in {self.stand_ins} times for kernels, as one failed")
        return "\n".join(lines)

    def _tensor_ops_line(self) -> list[str]:
        if not self.tensor_ops:
            return []
        count = f"{self.tensor_ops_in_kernels} of {len(self.tensor_ops)}"
        return [f"{count} products, convolutions and attention in kernels, the others in ATen"]
