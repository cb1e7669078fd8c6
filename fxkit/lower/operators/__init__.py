"""What each operator computes: one row of a table each."""
