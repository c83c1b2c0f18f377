"""The contract of an index, and the streams that it is given."""
