"""Results of a run: rows, the table of figures, and the report that prints, compares and asserts them."""
