"""Branches on tensors as nodes: each side recorded, both joined into one graph."""
