"""Times of kernels and of torch's libraries, measured once and kept on disk."""
