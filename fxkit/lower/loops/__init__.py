"""Which nodes share a kernel, and the loop IR of what it computes."""
