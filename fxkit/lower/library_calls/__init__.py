"""Calls of torch's own libraries with weights that were packed once."""
