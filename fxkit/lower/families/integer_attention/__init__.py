"""Attention whose two products multiply 8-bit integers."""
