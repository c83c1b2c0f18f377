"""Injected faults: events lost, doubled, late or changed between workers and router."""
