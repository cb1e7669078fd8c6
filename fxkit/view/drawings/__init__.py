"""A graph as a picture: what is in it, where it lies, and how it is written down."""
