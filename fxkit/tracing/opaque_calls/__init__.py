"""Calls that stay as they are in a graph, since nothing can look into them."""
