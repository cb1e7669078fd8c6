"""The demo's report: one HTML file with what every step did."""

from __future__ import annotations

from collections.abc import Iterator

from fxkit import cpu_info
from fxkit.demo.journey import Journey
from fxkit.timing import machine
from fxkit.view.reports.report_page import Report
from fxkit.view.texts.text_table import duration, percent


def report(journey: Journey) -> Report:
    """Put the report together; `.save(path)` writes it."""
    gm, verdict = journey.result.graph_module, journey.verdict
    return (
        Report(
            "all-MiniLM-L6-v2 through fxkit",
            lead=f"{len(journey.subject.texts)} sentences, {machine()}",
        )
        .add_summary(_facts(journey))
        .add_profile(
            journey.profile,
            journey.fused_profile,
            seconds=(journey.times["eager"], journey.times["fxkit"]),
        )
        .add_passes(journey.result)
        .add_timeline(journey.result)
        .add_diff(journey.before, gm)
        .add_graph(gm)
        .add_tree(gm)
        .add_regions(journey.built.module.regions, journey.built.module.kernels)
        .add_errors(
            {"eager": verdict.eager_error, "fxkit": verdict.error},
            note="The norm of the difference, relative to the norm of the float64 embeddings.",
        )
        .add_table(
            "Nearest neighbours",
            ["sentence", "nearest by eager", "cosine", "nearest by fxkit", "cosine"],
            _neighbour_rows(journey),
            "What the embeddings are for: a sentence's neighbours say something like it.",
        )
        .add_source("kernels.cpp", journey.built.module.source)
        .add_environment({"CPU": cpu_info.model_name()})
    )


def _facts(journey: Journey) -> dict[str, str]:
    report, times = journey.built.module.report(), journey.times
    return {
        "nodes captured": str(len(journey.before.graph.nodes)),
        "nodes after the passes": str(len(journey.result.graph_module.graph.nodes)),
        "fused, of what can be": percent(report.fused, report.candidates),
        "kernels built in": duration(journey.built.cold),
        **{f"a call of {name}": duration(seconds) for name, seconds in times.items()},
        "fxkit is faster by": f"{times['eager'] / times['fxkit']:.2f} ×",
    }


def _neighbour_rows(journey: Journey) -> Iterator[list[str]]:
    texts, verdict = journey.subject.texts, journey.verdict
    for text, eager, ours in zip(texts, verdict.eager, verdict.ours, strict=True):
        yield [
            text,
            texts[eager[0].index],
            f"{eager[0].similarity:.4f}",
            texts[ours[0].index],
            f"{ours[0].similarity:.4f}",
        ]
