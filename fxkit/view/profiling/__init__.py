"""Time, operations, bytes and memory of each node: measured, summed up, charted."""
