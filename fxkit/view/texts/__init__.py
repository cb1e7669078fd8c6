"""Labels, numbers, colours and tables: what all views write with."""
