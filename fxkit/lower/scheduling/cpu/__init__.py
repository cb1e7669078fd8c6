"""The schedule of a kernel on a CPU: one decision a file."""
