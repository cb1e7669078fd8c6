"""Products of matrices, and what goes on with them."""
