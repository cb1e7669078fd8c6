"""Bring your own: a Python function of scalars becomes an operator of tensors."""
