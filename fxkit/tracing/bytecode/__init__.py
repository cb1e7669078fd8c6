"""The bytecode of Python functions: read, followed, and given hooks around calls."""
