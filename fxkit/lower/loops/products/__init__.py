"""Matrix products and convolutions in kernels, with the operators that go on with them."""
