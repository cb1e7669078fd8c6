"""From a graph to a compiled module: the plan, its kernels, and its program."""
