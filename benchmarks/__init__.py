"""Benchmarks: `make bench`. Each compares, in turn, with what one would use instead."""
