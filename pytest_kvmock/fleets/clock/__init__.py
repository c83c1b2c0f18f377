"""Engines in virtual time, and the clock that several of them share; no router."""
