"""The router's side: the index of who holds what."""
