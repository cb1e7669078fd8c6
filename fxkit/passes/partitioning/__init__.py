"""Graphs in parts: submodules, stages, and calls of backends."""
