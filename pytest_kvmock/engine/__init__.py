"""Engines: requests as moves."""
