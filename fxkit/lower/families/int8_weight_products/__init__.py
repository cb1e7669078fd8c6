"""Products of a few rows of float32 by a matrix of 8-bit integers."""
