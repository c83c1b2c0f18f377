"""Fleets of P/D pairs: two picks and two legs for each request, and the figures of each role."""
