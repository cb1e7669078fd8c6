"""What `fxkit.compile` makes of a program: the compiled callable, module and method."""
