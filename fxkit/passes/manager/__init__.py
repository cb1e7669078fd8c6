"""What runs passes: order, contracts, checks, records, failures, and the search for what broke."""
