"""The lists name just the operators that torch registers an autocast kernel for."""

from __future__ import annotations

import pytest
import torch

from fxkit.ir.schema import signatures
from fxkit.passes.layers.autocast_lists import AUTOCAST, BANNED, HIDING, WITH_DTYPE, overload_key

KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


@pytest.mark.parametrize("device", KEYS)
def test_every_kernel_is_listed_and_nothing_else(device):
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device])
    names = {name.removeprefix("aten::") for name in registered}
    reachable = {name for name in names if _is_reachable(name)}
    assert set(AUTOCAST[device]) | BANNED.get(device, set()) == reachable - HIDING


def _is_reachable(name: str) -> bool:
    """Tell whether a call binds to an overload; to those for named dimensions, none does."""
    known = signatures(name.partition(".")[0])
    return name in {overload_key(signature.overload) for signature in known}


def test_overloads_with_a_dtype_exist():
    for name, wider in WITH_DTYPE.items():
        packet = getattr(torch.ops.aten, name.partition(".")[0])
        assert "dtype" in [a.name for a in getattr(packet, wider)._schema.arguments]


def test_a_key_is_the_name_in_the_lists():
    aten = torch.ops.aten
    assert overload_key(aten.linear.default) == "linear"
    assert overload_key(aten.conv2d.padding) == "conv2d.padding"
    assert overload_key(torch.ops.prims.add.default) == ""
