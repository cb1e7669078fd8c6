"""Runs torch's own operators through `fxkit.compile`, in a process that may crash.

`python -m tests.lower.operator_worker FILE FIRST STEP` appends a line of JSON to FILE before and
after each operator of torch's table, from the FIRST on in steps of STEP.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import fxkit.compiler
from fxkit.lower import Policy, to_cpp

SAMPLES = 2  # of each operator: the first, and one from the middle
ERRORS = 3
SECONDS = 120  # for one operator; after that the process ends, which counts as a crash

Program = Callable[..., Any]


def operators() -> list[Any]:
    """Return torch's table of operators, those with float32 samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [info for info in op_db if torch.float32 in info.dtypes]


def program(info: Any, sample: Any) -> tuple[Program, list[torch.Tensor]]:
    """Return a sample as a function of its tensors."""
    leaves, form = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, form)
        return info.op(*args, **kwargs)

    return run, [leaves[place].detach() for place in places]


def samples(info: Any) -> Iterator[Any]:
    torch.manual_seed(0)
    every = list(info.sample_inputs("cpu", torch.float32, requires_grad=False))
    yield from every[:: max(1, len(every) // SAMPLES)][:SAMPLES]


def outcome(run: Program, tensors: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Return a program's result, or the type of its error, and its inputs after it."""
    copies = [t.clone() for t in tensors]
    torch.manual_seed(1)
    try:
        return run(*copies), copies
    except Exception as error:  # whatever eager raises, the compiled program has to
        return type(error), copies


def agrees(found: Any, eager: Any, exact: Any) -> bool:
    """Tell whether a result is eager's, or at most twice as far from float64 as eager's is."""
    found, eager = pytree.tree_leaves(found), pytree.tree_leaves(eager)
    exact = pytree.tree_leaves(exact)
    if len(found) != len(eager):
        return False
    precise = exact if len(exact) == len(eager) else eager
    return all(map(_agrees, found, eager, precise))


def _agrees(found: Any, eager: Any, exact: Any) -> bool:
    if not isinstance(eager, torch.Tensor):
        return bool(found == eager or (found != found and eager != eager))
    if not isinstance(found, torch.Tensor) or found.layout != eager.layout:
        return False
    if eager.layout == torch.strided and found.stride() != eager.stride():
        return False
    try:
        torch.testing.assert_close(found, eager, rtol=2e-5, atol=1e-5, equal_nan=True)
    except AssertionError:
        if found.shape != eager.shape or found.dtype != eager.dtype or exact.shape != eager.shape:
            return False
        ours, eagers = ((x.double() - exact).abs().max() for x in (found, eager))
        return bool(ours <= 2 * eagers)
    return True


def doubled(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def check(run: Program, tensors: list[torch.Tensor]) -> dict[str, str]:
    """Compare a program with itself compiled; say what became of it."""
    eager, eager_inputs = outcome(run, tensors)
    again, _ = outcome(run, tensors)
    if not agrees(again, eager, eager):
        return {"status": "undetermined", "reason": "eager gives another result each time"}
    exact, _ = outcome(run, doubled(tensors))
    compiled = fxkit.compiler.compile(run)
    for call in ("first", "second"):
        found, inputs = outcome(compiled, tensors)
        if isinstance(eager, type) or isinstance(found, type):
            if isinstance(found, type) != isinstance(eager, type):
                return {"status": "wrong", "reason": f"{call} call: {found} for {eager}"}
            continue
        if not agrees(found, eager, exact) or not agrees(inputs, eager_inputs, eager_inputs):
            return {"status": "wrong", "reason": f"{call} call: another result than eager's"}
    return _manner(compiled)


def _manner(compiled: Any) -> dict[str, str]:
    """Say whether generated code ran, or why not."""
    regions = [region for module in compiled.modules for region in module.regions]
    ran = sum(module.report().calls for module in compiled.modules)
    if ran and any(region.kernel for region in regions):
        return {"status": "generated", "reason": ""}
    reasons = [region.reason for region in regions if region.reason]
    if not compiled.modules:
        return {"status": "aten", "reason": "no graph was captured"}
    found = reasons[0] if reasons else "it is neither pointwise nor normalising"
    return {"status": "aten", "reason": re.sub(r"has no row for \S+", "has no row for it", found)}


def verdict(info: Any) -> dict[str, str]:
    """Return the worst, or else the best, of what became of an operator's samples."""
    if "empty" in info.name:
        return {"status": "undetermined", "reason": "it returns whatever the memory holds"}
    found = [{"status": "aten", "reason": "it has no samples that this machine can make"}]
    try:
        every = list(samples(info))
        has_errors = info.error_inputs_func is not None
        errors = info.error_inputs("cpu") if has_errors else ()
        wrong_calls = [e.sample_input for e in itertools.islice(errors, ERRORS)]
    except (RuntimeError, ImportError):  # needs what is not there, such as a device or SciPy
        return found[0]
    results = [check(*program(info, sample)) for sample in every]
    for sample in wrong_calls:
        result = check(*program(info, sample))
        results += [result] if result["status"] == "wrong" else []
    for status in ("wrong", "generated", "undetermined", "aten"):
        found = [r for r in results if r["status"] == status] or found
        if found[0]["status"] == status and results:
            return found[0]
    return found[0]


def main(file: str, first: int, step: int) -> None:
    """Check every STEP-th operator from the FIRST on."""
    warnings.simplefilter("ignore")
    every = functools.partial(to_cpp, policy=Policy(min_members=1))
    fxkit.compiler.to_cpp = every  # compile whatever can be, be it ever so small
    table = operators()
    for index in range(first, len(table), step):
        name = f"{table[index].name}.{table[index].variant_test_name}".rstrip(".")
        _append(file, {"index": index, "operator": name})
        signal.alarm(SECONDS)
        with torch.no_grad():
            result = verdict(table[index])
        signal.alarm(0)
        _append(file, {"index": index, "operator": name, **result})


def _append(file: str, line: dict[str, Any]) -> None:
    with Path(file).open("a") as out:
        out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
