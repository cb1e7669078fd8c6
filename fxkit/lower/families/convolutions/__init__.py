"""Convolutions of images, and what goes on with them."""
