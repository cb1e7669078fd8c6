"""Fusion: which nodes share a kernel, and the loop IR of what they compute."""
