"""Engines: workers, their requests, and the drivers that bring those to a block manager."""
