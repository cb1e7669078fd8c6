"""Rows of float16: converted beside the loops, moved as they are, rounded between loops."""
