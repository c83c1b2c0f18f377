"""Whole engines in virtual time, and the clock that several of them share: passes, arrivals, handoffs; no router."""
