"""Entries of torch's table of operators (OpInfo), which its own test suites read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from fxkit.errors import UnsupportedError
from fxkit.torch_adapters.private_names import private

_PURPOSE = "entries of torch's table of operators"
_WITHOUT = "opinfo() of an operator of one's own raises"
_ENTRY = private("torch.testing._internal.opinfo.core.OpInfo", _PURPOSE, _WITHOUT)
_SAMPLE = private("torch.testing._internal.opinfo.core.SampleInput", _PURPOSE, _WITHOUT)
_DTYPES = private("torch.testing._internal.common_dtype._dispatch_dtypes", _PURPOSE, _WITHOUT)


class Sample(NamedTuple):
    """What an operator may be called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def opinfo(
    name: str,
    op: Callable[..., Any],
    reference: Callable[..., Any],
    dtypes: Iterable[torch.dtype],
    samples: Callable[..., Iterator[Sample]],
) -> Any:
    """Return an entry of torch's table of operators.

    Args:
        name: The operator's name.
        op: The operator.
        reference: Computes it of NumPy's arrays.
        dtypes: What its operands may be.
        samples: Yields samples for a device, a dtype and whether gradients are asked for.

    Raises:
        UnsupportedError: When this torch has no such table, or one of its own requirements, such as
            `expecttest`, is not installed.
    """
    parts = [each.get() for each in (_ENTRY, _SAMPLE, _DTYPES)]
    if None in parts:
        raise UnsupportedError(
            f"expected torch's table of operators, got torch {torch.__version__} without",
            hint="install what torch.testing._internal needs: pip install expecttest numpy",
        )
    entry, sample, dispatched = parts
    known = set(dtypes)

    def inputs(info: Any, device: Any, dtype: torch.dtype, requires_grad: bool, **_: Any) -> Any:
        for args, kwargs in samples(device, dtype, requires_grad):
            yield sample(args[0], args=args[1:], kwargs=kwargs)

    return entry(
        name,
        op=op,
        ref=reference,
        method_variant=None,
        inplace_variant=None,
        operator_variant=None,
        inplace_operator_variant=None,
        dtypes=dispatched(known),
        backward_dtypes=dispatched({dtype for dtype in known if dtype.is_floating_point}),
        sample_inputs_func=inputs,
        supports_forward_ad=True,
        supports_fwgrad_bwgrad=True,
    )
