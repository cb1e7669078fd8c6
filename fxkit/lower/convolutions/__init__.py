"""Convolutions with packed weights, their channels innermost."""
