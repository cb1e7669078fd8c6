"""Eager, torch.compile and fxkit on kernels and models, in turn, beside a roofline."""
