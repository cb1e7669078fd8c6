"""What runs compiled programs: the C binding, memory, and calls of kernels."""
