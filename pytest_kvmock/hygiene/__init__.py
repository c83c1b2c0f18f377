"""Event hygiene: a ledger of the blocks that events store and remove, the rules of a stream, and the report."""
