"""Operators in terms of others: recorded, spelled as ATen, made functional."""
