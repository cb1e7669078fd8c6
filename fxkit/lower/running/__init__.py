"""The compiled module: the graph that runs, and the calls of its kernels."""
