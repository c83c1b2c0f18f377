"""Injected faults: events lost, doubled, late or changed on their way from workers to router."""
