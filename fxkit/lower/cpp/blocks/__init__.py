"""Kernels that compute a block of a result at once: products, convolutions, attention."""
