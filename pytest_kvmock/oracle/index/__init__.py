"""The router's side: the reference index of which worker holds which block, and the recovery of missed events."""
