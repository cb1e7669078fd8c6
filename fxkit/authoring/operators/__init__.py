"""`@fxkit.operator`: a Python function of scalars becomes an operator of tensors."""
