"""A table of dialects, and one codec for all of them."""
