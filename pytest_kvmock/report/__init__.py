"""What a run leaves: rows, figures as one table, and the report that prints, writes, compares and requires them."""
