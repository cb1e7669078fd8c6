"""Exact convolutions of 8-bit integers."""
