"""Bring your own: operators from Python functions, kernels from C++ and CUDA sources."""
