"""Loops that say how many elements they handle at once, where the compiler finds no short way."""
