"""Event hygiene: a ledger of the blocks that events store and remove, the rules for a stream, and the report."""
