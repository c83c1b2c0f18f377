"""Dialects as a table, and one codec for all of them."""
