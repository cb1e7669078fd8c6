"""torch's own sample inputs for the operators of both tables, through `to_cpp`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxkit.lower.operators import reduction_ops, scalar_ops
from tests import opinfos
from tests.lower.kernels import compile_all, fused_names
from tests.sampling import runs_every_case

SAMPLES = {torch.float32: 2, torch.int64: 1}
SAMPLES_IN_SWEEPS = 4
NAMES = {
    name.rpartition(".")[2] for name in (*scalar_ops.TABLE, *reduction_ops.TABLE)
} - {"rand_like", "clone"}  # fmt: skip


def samples(dtype: torch.dtype) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return `(function, arguments, keyword arguments)` that eager accepts, with tensor results."""
    most = SAMPLES_IN_SWEEPS if runs_every_case() else SAMPLES[dtype]
    found = []
    for op in opinfos.table().op_db:
        name = op.aten_name or op.name
        home = getattr(op.op, "__module__", None) or ""
        is_torchs = not home.startswith("torch.testing") and callable(op.op)
        if name not in NAMES or not is_torchs or not op.supports_dtype(dtype, "cpu"):
            continue
        for number, sample in enumerate(op.sample_inputs("cpu", dtype)):
            if number == most:
                break
            args, kwargs = (sample.input, *sample.args), sample.kwargs
            try:
                result = op.op(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError):
                continue
            if isinstance(result, torch.Tensor) and _plain(args, kwargs):
                found.append((op.op, args, kwargs))
    return found


def _plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a sample can be written as a graph: no containers of tensors, no functions."""
    kinds = (torch.Tensor, bool, int, float, str, type(None), torch.dtype, tuple, list)
    return all(
        isinstance(v, kinds)
        and not (isinstance(v, (tuple, list)) and any(isinstance(w, torch.Tensor) for w in v))
        for v in (*args, *kwargs.values())
    )


@pytest.mark.one_in(2)
@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_samples_agree_with_eager(dtype: torch.dtype) -> None:
    calls = samples(dtype)
    compiled, inputs, nodes = compile_all(calls)
    with torch.no_grad():
        results = compiled(*inputs)
    wrong = []
    for (function, args, kwargs), node, found in zip(calls, nodes, results, strict=True):
        expected = function(*args, **kwargs)
        try:
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            wrong.append(f"{node}: {str(error).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)
    assert compiled.report().calls == 1
    assert len(fused_names(compiled)) >= (150 if dtype == torch.float32 else 60)
