"""Request traces: a reader of the Mooncake format, and a generator of the same form."""
