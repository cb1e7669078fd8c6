"""What a program calls and can reach beside its arguments, seen while it runs."""
