"""Block managers: one folder an engine, and what they share."""
