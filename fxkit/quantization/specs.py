"""How a tensor is quantised: type, range of numbers, scheme, granularity and observer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxkit import cpu_info
from fxkit.errors import UnsupportedError
from fxkit.quantization.observers import OBSERVERS, RangeObserver

SCHEMES = ("symmetric", "affine")
GRANULARITIES = ("per_tensor", "per_channel", "per_group", "per_token")

_PAIRED = ("per_tensor", "per_channel")
_LIMITS = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-32768, 32767)}
_FLOATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class TensorSpec:
    """How one kind of tensor is quantised.

    An element x is stored as clamp(round(x / scale) + zero_point, low, high). Types in floating
    point store weights only: float8 as the number nearest to clamp(x / scale, low, high), with a
    scale for the tensor or each channel, bfloat16 as the number nearest to x.

    Attributes:
        dtype: The type that numbers are stored in: integers, float8_e4m3fn, float8_e5m2, bfloat16.
        low: The least integer that is used; in floating point the type's least finite number.
        high: The largest one, likewise.
        scheme: `symmetric`: zero stands in the middle, `affine`: anywhere.
        granularity: What shares a scale: the tensor, a channel, `group_size` elements of a
            channel, or a token (a row along the last axis).
        group_size: Elements of a group, for `per_group`.
        observer: What finds the range: a name of `fxkit.quantization.OBSERVERS`, or a class of
            `RangeObserver`.
        is_dynamic: Whether scales are computed in each call, from what is quantised.
        is_pair_safe: Whether scales are made so large that no sum of two products with bytes leaves
            16 bits: for int8 weights on processors without VNNI. It costs 0.4 bit or so.

    Raises:
        UnsupportedError: When the values contradict each other.
    """

    dtype: torch.dtype = torch.int8
    low: int = -128
    high: int = 127
    scheme: str = "symmetric"
    granularity: str = "per_tensor"
    group_size: int | None = None
    observer: str | type[RangeObserver] = "min_max"
    is_dynamic: bool = False
    is_pair_safe: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if self.dtype in _FLOATS:
            self._follow_dtype()
        limits = _LIMITS.get(self.dtype, (self.low, self.high))
        if self.dtype not in (*_LIMITS, *_FLOATS):
            _refuse("dtype", f"one of {[str(t) for t in (*_LIMITS, *_FLOATS)]}", self.dtype)
        elif not limits[0] <= self.low < self.high <= limits[1]:
            _refuse("range", f"low < high within {limits}", (self.low, self.high))
        if self.scheme not in SCHEMES:
            _refuse("scheme", f"one of {SCHEMES}", self.scheme)
        if self.granularity not in GRANULARITIES:
            _refuse("granularity", f"one of {GRANULARITIES}", self.granularity)
        if (self.granularity == "per_group") != (self.group_size is not None):
            _refuse("group_size", "a size for per_group, and none else", self.group_size)
        if self.group_size is not None and not _is_size(self.group_size):
            _refuse("group_size", "a whole number of at least 2", self.group_size)
        is_class = isinstance(self.observer, type) and issubclass(self.observer, RangeObserver)
        if not is_class and not isinstance(self.observer, str):
            _refuse("observer", "a name, or a class of RangeObserver", self.observer)
        if isinstance(self.observer, str) and self.observer not in OBSERVERS:
            names = ", ".join(sorted(OBSERVERS))
            _refuse("observer", f"one of {names}, or a class of RangeObserver", self.observer)
        if (self.granularity == "per_token") != self.is_dynamic:
            _refuse("is_dynamic", "true for per_token, else false", self.is_dynamic)
        whole = (torch.int8, -127, 127, "symmetric")
        fits = (self.dtype, self.low, self.high, self.scheme) == whole
        if self.is_pair_safe and not (fits and self.granularity in _PAIRED):
            wanted = "false, but for symmetric int8 within ±127 with scales of tensors or channels"
            _refuse("is_pair_safe", wanted, self.is_pair_safe)

    def _follow_dtype(self) -> None:
        """Take the range of a type in floating point, and check what it leaves to choose."""
        high = int(torch.finfo(self.dtype).max)
        if (self.low, self.high) not in ((-128, 127), (-high, high)):
            _refuse("range", f"none for {self.dtype}, which has its own", (self.low, self.high))
        object.__setattr__(self, "low", -high)
        object.__setattr__(self, "high", high)
        if self.scheme != "symmetric":
            _refuse("scheme", f"symmetric for {self.dtype}", self.scheme)
        kinds = _PAIRED if self.has_scale else ("per_tensor",)
        if self.granularity not in kinds:
            wanted = " or ".join(kinds) if self.has_scale else "per_tensor, as it has no scale,"
            _refuse("granularity", f"{wanted} for {self.dtype}", self.granularity)

    @property
    def is_float(self) -> bool:
        """Whether numbers are stored in floating point, of fewer bits."""
        return self.dtype in _FLOATS

    @property
    def has_scale(self) -> bool:
        """Whether stored numbers are multiplied by a scale; those of bfloat16 are not."""
        return self.dtype != torch.bfloat16

    @property
    def bits(self) -> int:
        """Bits that a stored number needs."""
        if self.is_float:
            return 8 * self.dtype.itemsize
        return (self.high - self.low).bit_length()

    def __str__(self) -> str:
        if self.is_float:
            return " ".join((_FLOATS[self.dtype], *([self.granularity] if self.has_scale else ())))
        group = f" {self.group_size}" if self.group_size else ""
        kind = "u" if self.low == 0 else "s"
        safe = " pair-safe" if self.is_pair_safe else ""
        return f"{kind}{self.bits} {self.scheme} {self.granularity}{group}{safe}"


@dataclass(frozen=True)
class QuantizationSpec:
    """How operators are quantised that multiply activations by weights.

    Attributes:
        activations: How activations are, or None where they stay in floating point.
        weights: How weights are.

    Raises:
        UnsupportedError: When activations are to be stored in floating point of fewer bits, or with
            scales for channels or groups; when there is no spec of weights.
    """

    activations: TensorSpec | None
    weights: TensorSpec

    def __post_init__(self) -> None:
        """Check that activations are integers of one scale or one a token, or stay."""
        if not isinstance(self.weights, TensorSpec):
            raise UnsupportedError(
                f"expected a TensorSpec of weights, got {self.weights!r}",
                hint="by_operator={F.linear: None} and by_module= leave operators in float",
            )
        if isinstance(self.activations, TensorSpec) and self.activations.is_float:
            raise UnsupportedError(
                f"expected activations that are stored as integers, or None, got "
                f"{self.activations}",
                hint="float8 and bfloat16 are storage of weights only: QuantizationSpec(None, ...)",
            )
        granularity = self.activations and self.activations.granularity
        if granularity in ("per_channel", "per_group"):
            raise UnsupportedError(
                f"expected granularity of activations: per_tensor or per_token, got {granularity}",
                hint="sums can't be scaled by what differs from term to term",
            )


def int8_static(
    activations: str = "per_tensor",
    weights: str = "per_channel",
    *,
    scheme: str = "affine",
    observer: str | type[RangeObserver] = "mse",
    pair_safe: bool | None = None,
) -> QuantizationSpec:
    """Return activations of 8 bits whose scales are found by calibration, and int8 weights.

    Args:
        activations: Granularity of activations: `per_tensor`.
        weights: Granularity of weights: `per_channel` or `per_tensor`.
        scheme: Of activations: `affine` (uint8) or `symmetric` (int8).
        observer: What finds the range of activations: a name, or a class of `RangeObserver`.
        pair_safe: Whether weights get scales for which sums of two products stay in 16 bits. None:
            where the processor has AVX2 and no VNNI, so that its fastest product is exact.

    Raises:
        UnsupportedError: When a granularity is none of these.
    """
    if activations != "per_tensor":
        raise UnsupportedError(
            f"expected granularity of activations: per_tensor, got {activations!r}",
            hint="a scheme is given by its name: int8_static(scheme='symmetric')",
        )
    is_affine = scheme == "affine"
    return QuantizationSpec(
        TensorSpec(
            torch.uint8 if is_affine else torch.int8,
            0 if is_affine else -128,
            255 if is_affine else 127,
            scheme,
            activations,
            observer=observer,
        ),
        _int8_weights(weights, pair_safe),
    )


def int8_dynamic(
    weights: str = "per_channel", *, scheme: str = "affine", pair_safe: bool | None = None
) -> QuantizationSpec:
    """Return activations of 8 bits whose scales are computed per token in each call.

    Args:
        weights: Granularity of weights: `per_channel` or `per_tensor`.
        scheme: Of activations.
        pair_safe: Whether weights get scales for which sums of two products stay in 16 bits. None:
            where the processor has AVX2 and no VNNI, so that its fastest product is exact.
    """
    spec = TensorSpec(scheme=scheme, granularity="per_token", is_dynamic=True)
    return QuantizationSpec(spec, _int8_weights(weights, pair_safe))


def int8_weight_only(weights: str = "per_channel") -> QuantizationSpec:
    """Return int8 weights; activations stay in floating point."""
    return QuantizationSpec(None, _int8_weights(weights))


def int4_weight_only(group_size: int = 128, *, scheme: str = "affine") -> QuantizationSpec:
    """Return weights of 4 bits in groups along their inner axis.

    Args:
        group_size: Elements that share a scale; it has to divide the length of a row.
        scheme: `affine`, with zero points, or `symmetric`.
    """
    weights = TensorSpec(torch.int8, -8, 7, scheme, "per_group", group_size)
    return QuantizationSpec(None, weights)


def int4_dynamic(group_size: int = 128, *, scheme: str = "affine") -> QuantizationSpec:
    """Return activations of 8 bits whose scales are computed per token, and weights of 4 bits.

    Args:
        group_size: Elements of a row of a weight that share a scale; it has to divide the row.
        scheme: Of activations and weights.
    """
    activations = int8_dynamic(scheme=scheme).activations
    return QuantizationSpec(activations, int4_weight_only(group_size, scheme=scheme).weights)


def float8_weight_only(
    dtype: torch.dtype = torch.float8_e4m3fn, weights: str = "per_channel"
) -> QuantizationSpec:
    """Return float8 weights with scales of max|w| / the type's largest number.

    Activations stay in floating point.

    Args:
        dtype: `torch.float8_e4m3fn`, with three bits of mantissa, or `torch.float8_e5m2`, with two.
        weights: Granularity of weights: `per_channel` or `per_tensor`.

    Raises:
        UnsupportedError: When the type or the granularity is none of these.
    """
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2)
    if dtype not in kinds:
        _refuse("dtype", f"one of {[str(kind) for kind in kinds]}", dtype)
    if weights not in _PAIRED:
        _refuse("granularity of weights", "per_channel or per_tensor", weights)
    return QuantizationSpec(None, TensorSpec(dtype, granularity=weights))


def bfloat16_weight_only() -> QuantizationSpec:
    """Return bfloat16 weights, without scales; activations stay in floating point."""
    return QuantizationSpec(None, TensorSpec(torch.bfloat16))


def _int8_weights(granularity: str, pair_safe: bool | None = False) -> TensorSpec:
    if granularity not in ("per_channel", "per_tensor"):
        _refuse("granularity of weights", "per_channel or per_tensor", granularity)
    is_safe = cpu_info.adds_pairs_in_16_bits() if pair_safe is None else pair_safe
    return TensorSpec(torch.int8, -127, 127, "symmetric", granularity, is_pair_safe=is_safe)


def _is_size(group_size: object) -> bool:
    return isinstance(group_size, int) and not isinstance(group_size, bool) and group_size >= 2


def _refuse(what: str, expected: str, got: object) -> None:
    raise UnsupportedError(f"expected {what}: {expected}, got {got!r}")
