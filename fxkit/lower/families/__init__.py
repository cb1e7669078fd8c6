"""Families of kernels that are made of whole tensors, one folder each; see `family`."""
