"""Memory layout and aliasing: strides, channels last, views and what writes reach."""
