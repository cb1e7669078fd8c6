"""Attention: scores of queries and keys, and the values that they weigh."""
