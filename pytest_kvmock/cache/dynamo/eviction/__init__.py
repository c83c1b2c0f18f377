"""Which cached block goes next: one policy a module."""
