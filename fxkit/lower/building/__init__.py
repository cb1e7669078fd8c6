"""From text to a loaded library: compilers, flags and the cache on disk."""
