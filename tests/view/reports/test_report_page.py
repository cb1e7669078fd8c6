"""The report: self-contained, escaped, every section says what it was given."""

from __future__ import annotations

import html
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxkit.passes.canonicalise import Canonicalise
from fxkit.view import Report, diff, draw, profile, tree
from fxkit.view.pages.highlighting import highlight
from tests.view import models
from tests.view.browser import drive, needs_chromium

VOID = {"meta", "input", "br", "link", "img"}


class Checker(HTMLParser):
    """Checks that tags nest, and collects what refers to elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.references += [f"{tag} {a}" for a in ("src", "srcset", "data") if a in values]
        href = values.get("href")
        if href is not None:
            self.links.append(href)
        if values.get("id"):
            self.ids.append(values["id"] or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.references == []
    assert all(link.startswith("#") and link[1:] in checker.ids for link in checker.links)
    outside = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|@import|url\(|<link|src=", outside)
    return checker


def whole() -> Report:
    gm = models.stack(2)
    with torch.no_grad():
        measured = profile(gm, models.stack_args(), warmup=0, iters=1)
    record = SimpleNamespace(
        name="canonicalise",
        seconds=0.004,
        nodes_before=30,
        nodes_after=26,
        rewrites=Counter({"x * 1 -> x": 3}),
    )
    idle = SimpleNamespace(
        name="folding", seconds=0.001, nodes_before=26, nodes_after=26, rewrites=Counter()
    )
    regions = [
        SimpleNamespace(
            name="region_0", nodes=("gelu", "add"), kernel="kernel_0", reason=None, bytes_saved=768
        ),
        SimpleNamespace(
            name="x",
            nodes=("view",),
            kernel=None,
            reason="a view <costs> nothing",
            bytes_saved=None,
        ),
    ]
    return (
        Report("a <report> & more", lead="two layers")
        .add_summary({"nodes": 28, "faster": "1.4 ×"}, lead="what came of it")
        .add_environment({"CPU": "a fast one"})
        .add_tree(gm)
        .add_graph(gm)
        .add_passes(SimpleNamespace(records=[record, idle]))
        .add_diff(gm, models.stack(1))
        .add_regions(regions)
        .add_source("kernel.cpp", 'int f() { return 1 < 2; } // "<b>"')
        .add_profile(measured, measured, names=("eager", "compiled"))
        .add_errors({"eager": 1e-7, "fxkit": 2e-7})
        .add_table("Neighbours", ["a", "near"], [("<i>x</i>", 0.5), ("y", -1)])
        .add_table("Neighbours", ["again"], [])
    )


def test_report_is_one_file_that_refers_to_nothing(tmp_path: Path) -> None:
    path = whole().save(tmp_path / "report.html")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    checker = check(path.read_text(encoding="utf-8"))
    assert "neighbours-2" in checker.ids
    assert len(checker.links) == len(whole().sections)


def test_report_says_what_it_was_given() -> None:
    sections = {section.title: section for section in whole().sections}
    assert "1.4 ×" in sections["Summary"].html
    assert torch.__version__ in sections["Environment"].html
    assert "x * 1 -&gt; x × 3" in sections["Passes"].html
    assert Canonicalise.__doc__ is not None
    assert Canonicalise.__doc__.partition("\n")[0] in html.unescape(sections["Passes"].html)
    assert "nothing to do" in sections["Passes"].html
    assert sections["Passes"].lead.startswith("2 passes ran in this order and took 4 nodes away")
    assert "kernel_0" in sections["Fused regions"].html
    assert "a view &lt;costs&gt; nothing" in sections["Fused regions"].html
    assert "2.00 × that of eager" in sections["Numerical errors"].html
    assert "1.00 × as fast" in sections["Where the time goes"].html
    assert '<td class="fx-num">0.5</td>' in whole().sections[-2].html
    assert "removed" in sections["Changes"].html


def test_report_is_a_value() -> None:
    first = Report("title")
    second = first.add_summary({"a": 1})
    assert first.sections == ()
    assert [section.title for section in second.sections] == ["Summary"]


def test_titles_and_cells_are_escaped() -> None:
    page = whole().html()
    assert "<title>a &lt;report&gt; &amp; more</title>" in page
    assert "<i>x</i>" not in page


@pytest.mark.parametrize("make", [models.empty, models.hostile, models.wide, models.stack])
def test_every_page_is_self_contained(make) -> None:
    gm = make()
    check(draw(gm).html())
    check(tree(gm).html())
    check(diff(gm, models.stack(1)).html())
    check(Report("r").add_graph(gm).add_tree(gm).html())


def test_highlighting_marks_and_escapes() -> None:
    text = highlight('#include <x>\nfor (int i = 0; i < 4; ++i) s = "<b>"; // done', "cpp")
    assert '<span class="p">#include &lt;x&gt;</span>' in text
    assert '<span class="k">for</span>' in text
    assert '<span class="n">4</span>' in text
    assert '<span class="s">&quot;&lt;b&gt;&quot;</span>' in text
    assert '<span class="c">// done</span>' in text
    assert re.sub(r"</?span[^>]*>", "", highlight("x < 1", "other")) == "x &lt; 1"


DRIVER = """
  const viewer = document.querySelector(".fx-viewer");
  const before = JSON.stringify(viewer.fxViewer.state().camera);
  viewer.querySelector("[data-do=in]").click();
  const moved = JSON.stringify(viewer.fxViewer.state().camera) !== before;
  const input = viewer.querySelector("input");
  input.value = "GEL[UV]"; input.dispatchEvent(new Event("input"));
  document.querySelector("[data-theme-switch]").click();
  const head = document.querySelector(".fx-sortable th"); head.click();
  return {
    moved, hits: viewer.fxViewer.state().hits,
    theme: document.documentElement.dataset.theme,
    sorted: head.getAttribute("aria-sort"),
    wide: document.documentElement.scrollWidth <= innerWidth,
  };
"""


@needs_chromium
def test_page_works_in_a_browser(tmp_path: Path) -> None:
    found = drive(whole().html(), DRIVER, tmp_path)
    assert found == {
        "moved": True,
        "hits": ["gelu", "gelu_1"],
        "theme": "dark",
        "sorted": "descending",
        "wide": True,
    }


def test_unsteady_profiles_claim_no_ratio() -> None:
    with torch.no_grad():
        measured = profile(models.stack(1), models.stack_args(), warmup=0, iters=1)
    steady = replace(measured, end_to_end=2.0, quartiles=(2.0, 2.1))
    shaken = replace(measured, end_to_end=1.0, quartiles=(1.0, 3.0))
    unsure = Report("r").add_profile(steady, shaken).sections[0].html
    assert "as fast" not in unsure
    assert "something else ran on this machine" in unsure
    assert (
        "2.00 × as fast"
        in Report("r").add_profile(steady, replace(shaken, quartiles=(1.0, 1.0))).sections[0].html
    )
    assert (
        "3.00 × as fast"
        in Report("r").add_profile(steady, shaken, seconds=(3.0, 1.0)).sections[0].html
    )
