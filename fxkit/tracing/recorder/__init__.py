"""The recorder: it writes the torch calls of a running program into a graph."""
