"""The schedule of a kernel on a GPU: one transformation of its loop nest a file."""
