"""Runs torch's own operators through `fxkit.compile`, in a process that may crash.

`python -m tests.lower.operators.operator_worker FILE KINDS SAMPLES FIRST SKIPPED STEP [NAMES]`
appends a line of JSON to FILE before and after each call of the operators of torch's table whose
name matches the expression NAMES, from the FIRST on in steps of STEP, without the SKIPPED first
calls of that one.
KINDS are keys of `KINDS` with commas between them: a dtype, the gradients, other sizes than those
that were captured, tensors on a GPU, or, as the last one, CUDA text that runs on the processor.
FIRST and SKIPPED are of the first kind. At most SAMPLES calls of each operator are compared, spread
evenly over those of torch.
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

import fxkit.compiling.compiler
import fxkit.compiling.graph_compiler
from fxkit.analysis.equivalence import assert_equivalent
from fxkit.lower import Policy
from fxkit.lower.training import training_module
from fxkit.lower.training.training_module import TrainingModule
from tests import opinfos
from tests.lower.codegen.cuda.on_cpu import compile_as_cuda_text

ERRORS = 20  # calls that eager refuses
SECONDS = 300  # for one call; after that the process ends, which counts as a crash

# Kinds of samples with gradients, and of programs that are called at other sizes.
GRADIENTS = ("gradients", "gradients_at_sizes")
AT_SIZES = ("sizes", "gradients_at_sizes")
AS_CUDA_TEXT = "cuda_text"
ON_GPU = "gpu"
KINDS = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64,
    **dict.fromkeys((*GRADIENTS, *AT_SIZES, AS_CUDA_TEXT, ON_GPU), torch.float32),
}  # fmt: skip

# What each size of a sample becomes, one after the other, for one program of symbolic sizes.
OTHER_SIZES: tuple[Callable[[int], int], ...] = (
    lambda size: 2 * size, lambda size: size + 3, lambda size: 3 * size + 1, lambda size: size + 1,
)  # fmt: skip

# How far a result may be from eager's without a look at float64: (relative, absolute).
CLOSE = {torch.bfloat16: (1.6e-2, 1e-5), torch.float16: (1e-3, 1e-5)}
CLOSE_ELSE = (2e-5, 1e-5)

Program = Callable[..., Any]


def operators(kind: str = "float32", names: str = "") -> list[Any]:
    """Return torch's operators that have float32 samples, and samples or gradients of a kind."""
    table = opinfos.table()
    vars(table)["wrapper_set_seed"] = _without_seed
    found = [
        info for info in table.op_db if torch.float32 in info.dtypes and re.match(names, info.name)
    ]
    if kind in GRADIENTS:
        return [info for info in found if info.supports_autograd]
    return [info for info in found if KINDS[kind] in info.dtypes]


def _without_seed(run: Program, *args: Any, **kwargs: Any) -> Any:
    """Call what the table would seed the generator for, within what is to be captured."""
    return run(*args, **kwargs)


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

    tensors = [leaves[place] for place in places]
    return run, [t.detach().requires_grad_(t.requires_grad) for t in tensors]


def samples(info: Any, kind: str, count: int) -> Iterator[Any]:
    torch.manual_seed(0)
    device = "cuda" if kind == ON_GPU else "cpu"
    every = list(info.sample_inputs(device, KINDS[kind], requires_grad=kind in GRADIENTS))
    yield from every[:: max(1, len(every) // count)][:count]


def outcome(run: Program, tensors: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Return a program's result, or the type of its error, and its inputs after it."""
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    torch.manual_seed(1)
    try:
        result = run(*copies)
        return (*_gradients(result, copies), result), copies
    except Exception as error:  # whatever eager raises, the compiled program has to
        return type(error), copies


def _gradients(result: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients for made-up weights of the results, if any are asked for."""
    asked = [t for t in inputs if t.requires_grad]
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    followed = [t for t in leaves if t.requires_grad]
    if not asked or not followed or not torch.is_grad_enabled():
        return []
    torch.manual_seed(2)
    weights = [torch.randn(t.shape, dtype=torch.float64).to(t.dtype) for t in followed]
    found = torch.autograd.grad(followed, asked, weights, allow_unused=True)
    made = (torch.zeros_like(t) if g is None else g for t, g in zip(asked, found, strict=True))
    return [gradient.clone(memory_format=torch.contiguous_format) for gradient in made]


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
    if eager.layout == torch.strided and not (eager.is_floating_point() or eager.is_complex()):
        return found.dtype == eager.dtype and torch.equal(found, eager)
    relative, absolute = CLOSE.get(eager.dtype, CLOSE_ELSE)
    try:
        torch.testing.assert_close(found, eager, rtol=relative, atol=absolute, equal_nan=True)
    except AssertionError:
        if found.shape != eager.shape or found.dtype != eager.dtype or exact.shape != eager.shape:
            return False
        return _is_near(found.to(exact.dtype), eager.to(exact.dtype), exact)
    return True


def _is_near(found: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> bool:
    """Tell whether a result is at most twice as far off as eager's, and as infinite or NaN."""
    finite = eager.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return False
    if not torch.equal(found[~finite].nan_to_num(), eager[~finite].nan_to_num()):
        return False
    ours, eagers = ((x - exact)[finite].abs() for x in (found, eager))
    return not bool(finite.any()) or bool(ours.amax() <= 2 * eagers.amax())


def check_sizes(run: Program, tensors: list[torch.Tensor]) -> dict[str, str]:
    """Compare a program with itself compiled for symbolic sizes, at several ones."""
    compiled = fxkit.compiling.compiler.compile(run, dynamic=True)
    result: dict[str, str] = {}
    for resized in ((lambda size: size), *OTHER_SIZES):
        others = [grown(tensor, resized) for tensor in tensors]
        found = check(run, others, compiled)
        if found["status"] in ("wrong", "undetermined"):
            return found
        result = result if result.get("status") == "generated" else found
    return result


def grown(tensor: torch.Tensor, resized: Callable[[int], int]) -> torch.Tensor:
    """Return a tensor of other sizes that holds the same numbers, again and again."""
    shape = [size if size < 2 else resized(size) for size in tensor.shape]
    if tensor.layout != torch.strided or list(tensor.shape) == shape:
        return tensor
    for axis, size in enumerate(shape):
        places = torch.arange(size) % tensor.shape[axis]
        tensor = tensor.index_select(axis, places)
    return tensor


def doubled(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    wide = [t.detach().double() if t.is_floating_point() else t for t in tensors]
    return [w.requires_grad_(t.requires_grad) for w, t in zip(wide, tensors, strict=True)]


def check(
    run: Program, tensors: list[torch.Tensor], compiled: Program | None = None
) -> dict[str, str]:
    """Compare a program with itself compiled; say what became of it."""
    eager, eager_inputs = outcome(run, tensors)
    if not _is_repeated(run, tensors, eager, 1):
        return {"status": "undetermined", "reason": "eager gives another result each time"}
    exact, _ = outcome(run, doubled(tensors))
    compiled_for_all = compiled is not None
    compiled = fxkit.compiling.compiler.compile(run) if compiled is None else compiled
    for call in ("first", "second"):
        found, inputs = outcome(compiled, tensors)
        if isinstance(eager, type) or isinstance(found, type):
            if isinstance(found, type) != isinstance(eager, type):
                return {"status": "wrong", "reason": f"{call} call: {found} for {eager}"}
            continue
        if not agrees(inputs, eager_inputs, eager_inputs):
            return {"status": "wrong", "reason": f"{call} call: other inputs than eager's"}
        if not agrees(found, eager, exact) and not is_chance(run, compiled, tensors):
            if not _is_repeated(run, tensors, eager, 8):
                return {"status": "undetermined", "reason": "eager gives another result at times"}
            if compiled_for_all and not _is_told(eager, exact):
                return {"status": "undetermined", "reason": "float32 does not tell its result"}
            return {"status": "wrong", "reason": f"{call} call: another result than eager's"}
    if isinstance(eager, type):
        return {"status": "aten", "reason": f"eager raises a {eager.__name__}"}
    return _manner(compiled, tensors)


def _is_repeated(run: Program, tensors: list[torch.Tensor], eager: Any, times: int) -> bool:
    """Tell whether eager gives the same result so many times more."""
    return all(agrees(outcome(run, tensors)[0], eager, eager) for _ in range(times))


def _is_told(eager: Any, exact: Any) -> bool:
    """Tell whether eager's result is float64's at all.

    A matrix that was grown is singular, and what is computed of one may be nothing but rounding.
    """
    return all(map(_is_roughly, pytree.tree_leaves(eager), pytree.tree_leaves(exact)))


def _is_roughly(eager: Any, exact: Any) -> bool:
    if not isinstance(eager, torch.Tensor) or not eager.is_floating_point():
        return True
    finite = exact.isfinite()
    if eager.shape != exact.shape or not torch.equal(eager.isfinite(), finite):
        return False
    off = (eager.double() - exact)[finite].abs()
    return not off.numel() or bool(off.amax() <= 0.1 * exact[finite].abs().amax())


def is_chance(run: Program, compiled: Program, tensors: list[torch.Tensor]) -> bool:
    """Tell whether errors are at most twice eager's in the mean over other inputs like these."""
    try:
        assert_equivalent(run, compiled, tuple(tensors))
    except Exception:  # it can't be compared so, or differs
        return False
    return True


def _manner(compiled: Any, tensors: list[torch.Tensor]) -> dict[str, str]:
    """Say whether generated code ran, or why not."""
    regions = [region for module in compiled.compiled_modules for region in module.regions]
    if any(region.kernel for region in regions) and any(map(_has_run, compiled.compiled_modules)):
        return {"status": "generated", "reason": ""}
    if not compiled.compiled_modules:
        why = compiled.explain(*tensors).splitlines()[0].rpartition("got one where ")[2]
        return {"status": "aten", "reason": f"no graph was captured: {why}"}
    reasons = [
        m.reason for m in compiled.compiled_modules if isinstance(m, TrainingModule) and m.reason
    ]
    reasons += [
        reason for module in compiled.compiled_modules for reason in module.reasons.values()
    ]
    found = reasons[0] if reasons else "it computes nothing: it is a view"
    return {"status": "aten", "reason": re.sub(r"no row for \S+", "no row for it", found)}


def _has_run(module: Any) -> bool:
    """Tell whether the kernels of a module ran."""
    if not isinstance(module, TrainingModule):
        return module.report().calls > 0
    report = module.report()
    return any(part.calls > 0 for part in (report.forward, report.backward) if part is not None)


def calls(info: Any, kind: str, count: int) -> list[tuple[Any, bool]]:
    """Return the samples of an operator that are compared, and whether eager is to refuse each."""
    try:
        every = [(sample, False) for sample in samples(info, kind, count)]
        has_errors = info.error_inputs_func is not None and kind == "float32"
        errors = info.error_inputs("cpu") if has_errors else ()
        return every + [(e.sample_input, True) for e in itertools.islice(errors, ERRORS)]
    except (RuntimeError, ImportError):  # needs what is not there, such as a device or SciPy
        return []


def main(
    file: str, kinds: str, count: int, first: int, skipped: int, step: int, names: str
) -> None:
    """Check every STEP-th operator from the FIRST on, that one without its SKIPPED first calls."""
    torch.set_num_threads(1)  # what the environment says may have come after torch was imported
    for kind in kinds.split(","):
        check_kind(file, kind, count, first, skipped, step, names)
        first, skipped = first % step, 0


def check_kind(
    file: str, kind: str, count: int, first: int, skipped: int, step: int, names: str
) -> None:
    """Check operators in one kind of calls."""
    warnings.simplefilter("ignore")
    # Compile whatever can be, be it ever so small.
    vars(fxkit.compiling.graph_compiler)["Policy"] = functools.partial(Policy, min_members=1)
    training_module.CALL_SECONDS = -1.0
    if kind == AS_CUDA_TEXT:
        compile_as_cuda_text(Path(f"{file}_built"))
    table = operators(kind, names)
    for index in range(first, len(table), step):
        info = table[index]
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        every = [] if "empty" in info.name else calls(info, kind, count)
        if not every:
            place = {"kind": kind, "index": index, "operator": name, "call": 0}
            _append(file, {**place, **_no_calls(info)})
        for call, (sample, is_refused) in enumerate(every):
            if index == first and call < skipped:
                continue
            place = {"kind": kind, "index": index, "operator": name, "call": call}
            _append(file, place)
            signal.alarm(SECONDS)
            with torch.set_grad_enabled(kind in GRADIENTS):
                result = (check_sizes if kind in AT_SIZES else check)(*program(info, sample))
            signal.alarm(0)
            if is_refused and result["status"] != "wrong":
                result = {"status": "refused", "reason": ""}
            _append(file, {**place, **result})


def _no_calls(info: Any) -> dict[str, str]:
    if "empty" in info.name:
        return {"status": "undetermined", "reason": "it returns whatever the memory holds"}
    return {"status": "aten", "reason": "it has no samples that this machine can make"}


def _append(file: str, line: dict[str, Any]) -> None:
    with Path(file).open("a") as out:
        out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]), "".join(sys.argv[7:]))
