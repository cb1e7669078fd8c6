"""The steps of the demo, in order; each does one thing to the model and prints what came of it."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

import fxkit
from fxkit.demo import judge, model, sentences
from fxkit.demo.building import DemoModel, build
from fxkit.demo.journey import DemoSubject, DemoVerdict, Journey
from fxkit.demo.page import report
from fxkit.demo.progress import progress
from fxkit.errors import UnsupportedError
from fxkit.lower import CompiledModule
from fxkit.passes.manager.manager import PassResult
from fxkit.passes.pipelines import SIMPLIFY
from fxkit.timing import in_turn, machine
from fxkit.tracing.captured import Captured
from fxkit.view.profiling.profile_result import Profile
from fxkit.view.texts.labels import clip
from fxkit.view.texts.text_table import duration, percent, plural, quantity, table

Write = Callable[[str], object]

WIDTH = 110
TREE_LINES = 16
PROFILE_LINES = 6
KERNELS_SHOWN = 8
QUERIES = (0, 8, 16, 28)
NEIGHBOURS = 3
TIMING_SECONDS = 15
FEWEST_ROUNDS, MOST_ROUNDS = 5, 40


def run(
    *, out: Path, sentences: int | None = None, with_peer: bool = False, write: Write = print
) -> None:
    """Run the whole demo.

    Args:
        out: Folder for the drawing and the report; made when it is not there.
        sentences: How many sentences are encoded; all when left out.
        with_peer: Time torch.compile too.
        write: Takes each piece of text.

    Raises:
        FxkitError: When something that the demo needs is missing, or a step fails.
    """
    prepare_folder(out)
    write(f"fxkit {fxkit.__version__}, torch {torch.__version__}, {machine()}")
    subject = load(sentences, write)
    captured = capture(subject, write)
    before = snapshot(captured.graph_module)
    result = rewrite(captured.graph_module, subject, write)
    show_profile(measure_nodes(result.graph_module, subject), write)
    built = lower(result.graph_module, subject, write)
    verdict = compare(subject, built, write)
    times = measure(subject, built, with_peer, write)
    profiles = [measure_nodes(p, subject) for p in (result.graph_module, built.module)]
    save(Journey(subject, before, result, built, verdict, times, *profiles), out, write)


def prepare_folder(out: Path) -> None:
    """Make the folder for the results, before any time is spent."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".fxkit"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UnsupportedError(
            f"expected a folder that can be written to, got {out}: {error.strerror}",
            hint="name another one: python -m fxkit demo --out DIR",
        ) from error


def load(count: int | None, write: Write) -> DemoSubject:
    """Load the model and tokenise the sentences."""
    _heading("model", write)
    with progress("loading the model") as watch:
        demo = model.load()
        texts = sentences.ALL[:count]
        inputs = demo.inputs(texts)
    parameters = sum(p.numel() for p in demo.encoder.parameters())
    write(
        f"all-MiniLM-L6-v2, {quantity(parameters)} parameters, "
        f"loaded in {duration(watch.seconds)}\n"
        f"{plural(len(texts), 'sentence')} as token ids i64{list(inputs[0].shape)}"
    )
    return DemoSubject(texts, demo.encoder, inputs)


def capture(subject: DemoSubject, write: Write) -> Captured:
    """Record the model's program as one graph and show its modules."""
    _heading("capture", write)
    with progress("running the model once"):
        subject.encoder(*subject.inputs)
        start = time.perf_counter()
        subject.encoder(*subject.inputs)
        once = time.perf_counter() - start
    with progress("capturing") as watch:
        captured = fxkit.capture(subject.encoder, subject.inputs)
    nodes = len(captured.graph_module.graph.nodes)
    write(
        f"{plural(nodes, 'node')} and {plural(len(captured.guards), 'guard')} in "
        f"{duration(watch.seconds)}, of which the model itself runs for {duration(once)}\n"
    )
    tree = fxkit.tree(captured.graph_module).head(TREE_LINES)
    write("\n".join(clip(line, WIDTH) for line in tree.splitlines()))
    return captured


def rewrite(gm: fx.GraphModule, subject: DemoSubject, write: Write) -> PassResult:
    """Run the simplifying passes; after each pass compare outputs, against float64 too."""
    _heading("passes", write)
    manager = fxkit.PassManager(SIMPLIFY, verify="numerics", args=subject.inputs)
    with progress("running the passes") as watch:
        result = manager.run(gm)
    write(result.table())
    write(f"outputs compared after each pass; {duration(watch.seconds)} in all")
    return result


def snapshot(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph, since passes change it in place; parameters and buffers are shared."""
    tensors = (*gm.parameters(), *gm.buffers())
    return copy.deepcopy(gm, {id(tensor): tensor for tensor in tensors})


def measure_nodes(program: fx.GraphModule | CompiledModule, subject: DemoSubject) -> Profile:
    """Measure where a graph, or what it was compiled to, spends its time."""
    with progress("profiling"):
        return fxkit.profile(program, subject.inputs, warmup=1, iters=5)


def show_profile(profile: Profile, write: Write) -> None:
    """Show the operators that take the most time in eager."""
    _heading("profile", write)
    write(profile.table(group_by="op", limit=PROFILE_LINES))


def lower(gm: fx.GraphModule, subject: DemoSubject, write: Write) -> DemoModel:
    """Fuse regions into C++ kernels; tell what was fused, and why the rest was not."""
    _heading("regions", write)
    with progress("compiling kernels"):
        built = build(gm, subject.inputs)
    for note in built.notes:
        write(f"note: {note}")
    fused = [region for region in built.module.regions if region.kernel]
    left = [region for region in built.module.regions if not region.kernel]
    write(_kernel_table(fused))
    report = built.module.report()
    write(
        f"\n{report.fused} of {report.candidates} pointwise and normalising nodes "
        f"({percent(report.fused, report.candidates)}) run fused, in "
        f"{plural(len(fused), 'region')} with "
        f"{plural(len({region.kernel for region in fused}), 'kernel')}\n"
        f"{report.tensor_ops_in_kernels} of {len(report.tensor_ops)} products and attentions run "
        "in them, where that is faster than torch's library"
    )
    if left:
        write(_reason_table(left))
    write(
        f"\nbuilt from nothing in {duration(built.cold)}, from the cache in {duration(built.warm)}"
    )
    return built


def _kernel_table(fused: list[Any]) -> str:
    """Show each kernel once, with how many regions it serves, the largest savings first."""
    uses = Counter(region.kernel for region in fused)
    first = {region.kernel: region for region in reversed(fused)}
    saved = Counter[str]()
    for region in fused:
        saved[region.kernel] += region.bytes_saved or 0
    rows = [
        [kernel, f"× {uses[kernel]}", str(len(first[kernel].nodes)), quantity(total, "B"),
         ", ".join(first[kernel].nodes)]
        for kernel, total in saved.most_common(KERNELS_SHOWN)
    ]  # fmt: skip
    text = table(["kernel", "used", "nodes", "saved", "computes"], rows, align="<>>>")
    hidden = len(uses) - len(rows)
    return text + (f"\n… {plural(hidden, 'more kernel')}" if hidden > 0 else "")


def _reason_table(left: list[Any]) -> str:
    """Show each reason once, with the nodes that it holds for."""
    nodes: dict[str, list[str]] = {}
    for region in left:
        nodes.setdefault(region.reason or "", []).extend(region.nodes)
    rows = [[str(len(names)), names[0], reason] for reason, names in nodes.items()]
    return "\n" + table(["left to ATen", "such as", "because"], rows, align=">")


def compare(subject: DemoSubject, built: DemoModel, write: Write) -> DemoVerdict:
    """Judge the embeddings of eager and of fxkit: error, and nearest neighbours."""
    _heading("the same meaning", write)
    with progress("computing in float64"):
        exact = judge.reference(subject.encoder, subject.inputs)
    eager, ours = subject.encoder(*subject.inputs), built.module(*subject.inputs)
    verdict = DemoVerdict(
        judge.relative_error(eager, exact),
        judge.relative_error(ours, exact),
        judge.nearest(eager, NEIGHBOURS),
        judge.nearest(ours, NEIGHBOURS),
    )
    write(
        f"error against float64: eager {verdict.eager_error:.1e}, fxkit {verdict.error:.1e} "
        f"({verdict.error / verdict.eager_error:.2f} ×)"
    )
    for query in QUERIES:
        if query < len(subject.texts):
            _write_neighbours(query, subject, verdict, write)
    same = judge.same_neighbours(verdict.eager, verdict.ours)
    write(
        f"\nthe same {NEIGHBOURS} nearest neighbours, in the same order, for {same} of "
        f"{plural(len(subject.texts), 'sentence')}"
    )
    return verdict


def _write_neighbours(query: int, subject: DemoSubject, verdict: DemoVerdict, write: Write) -> None:
    write(f"\n{subject.texts[query]}\n  eager  fxkit")
    by_eager = {n.index: n.similarity for n in verdict.eager[query]}
    for neighbour in verdict.ours[query]:
        before = by_eager.get(neighbour.index)
        shown = "    –" if before is None else f"{before:.3f}"
        write(f"  {shown}  {neighbour.similarity:.3f}  {subject.texts[neighbour.index]}")


def measure(
    subject: DemoSubject, built: DemoModel, with_peer: bool, write: Write
) -> dict[str, float]:
    """Time eager, fxkit and, when asked for, torch.compile, in turn."""
    _heading("time", write)
    candidates: dict[str, Callable[[], object]] = {
        "eager": lambda: subject.encoder(*subject.inputs),
        "fxkit": lambda: built.module(*subject.inputs),
    }
    if with_peer:
        peer = torch.compile(subject.encoder)
        with progress("torch.compile") as watch:
            peer(*subject.inputs)
        write(f"torch.compile took {duration(watch.seconds)} to build")
        candidates["torch.compile"] = lambda: peer(*subject.inputs)
    with progress("timing"):
        once = sum(in_turn(candidates, rounds=1).values())
        rounds = max(FEWEST_ROUNDS, min(MOST_ROUNDS, int(TIMING_SECONDS / once)))
        times = in_turn(candidates, rounds=rounds, warmup=0)
    rows = [
        [name, duration(seconds), f"{times['eager'] / seconds:.2f} ×"]
        for name, seconds in times.items()
    ]
    write(table(["", "median", "eager / it"], rows, align="<>>"))
    write(f"{rounds} calls of each in turn, {machine()}")
    return times


def save(journey: Journey, out: Path, write: Write) -> None:
    """Write the drawing and the report."""
    _heading("files", write)
    with progress("drawing"):
        drawing = fxkit.draw(journey.result.graph_module).save(out / "graph.svg")
    with progress("writing the report"):
        page = report(journey).save(out / "report.html")
    write(f"{drawing}  the graph after the passes\n{page}  all of this, to look through")


def _heading(title: str, write: Write) -> None:
    write(f"\n── {title} {'─' * (76 - len(title))}")
