"""Forward and backward of captured programs as kernels, and fused steps of optimisers."""
