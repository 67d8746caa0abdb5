"""Networks whose state dicts have the names of other programs' networks."""
