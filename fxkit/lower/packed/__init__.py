"""Weights laid out once, for the libraries that compute convolutions and products."""
