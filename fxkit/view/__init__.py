"""See a graph, its costs, and what a pass did: trees, drawings, profiles, differences, reports."""

from __future__ import annotations

from fxkit.view.diffing import GraphDiff, diff
from fxkit.view.drawing import GraphView, draw
from fxkit.view.module_tree import Tree, tree
from fxkit.view.pass_timeline import TimelineView, timeline
from fxkit.view.profile_result import Profile
from fxkit.view.profiler import profile
from fxkit.view.report_page import Report

__all__ = [
    "GraphDiff",
    "GraphView",
    "Profile",
    "Report",
    "TimelineView",
    "Tree",
    "diff",
    "draw",
    "profile",
    "timeline",
    "tree",
]
