"""The router's side: the reference index of who holds which block, and the recovery of missed events."""
