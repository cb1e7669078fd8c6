"""Benchmarks: `make bench`. Each compares, in one run and in turn, with what one would use instead."""
