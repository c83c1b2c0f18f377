"""Fleets that run passes which only decode in one go, or each by itself: the results are the same."""


def planned(fleet, plans):
    """A fleet that plans passes, or does not."""
    fleet.plans = plans
    return fleet
