"""Captured graphs as functional ATen, forward alone or forward and backward."""
