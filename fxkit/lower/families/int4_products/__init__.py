"""Products by matrices of 4-bit integers in groups, two to a byte."""
