"""Capture a module by following it with placeholders instead of tensors."""


def capture_symbolically(fn, args, kwargs): ...
