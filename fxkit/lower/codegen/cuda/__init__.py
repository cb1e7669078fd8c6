"""Loop IR as CUDA text."""
