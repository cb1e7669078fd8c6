"""Exact matrix products of 8-bit integers."""
