"""Layers, norms, weights and casts as values that passes compare and rewrite."""
