"""Get graphs out of Python programs: by following them with placeholders, or by running them."""
