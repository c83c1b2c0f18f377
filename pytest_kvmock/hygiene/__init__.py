"""Event hygiene: what the events say is held, the rules they must keep, and the report when they do not."""
