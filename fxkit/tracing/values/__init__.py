"""What a program's values are taken for: structure, modes, stand-ins, reasons to refuse."""
