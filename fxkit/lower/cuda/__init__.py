"""Kernels for CUDA: the loop IR as CUDA text, built by nvcc, launched on torch's stream."""
