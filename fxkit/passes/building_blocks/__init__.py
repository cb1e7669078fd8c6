"""What several passes are made of: layers and norms as values, casts, parts, recordings, tables."""
