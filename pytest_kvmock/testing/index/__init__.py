"""The contract of an index, and the event streams that the index is given."""
