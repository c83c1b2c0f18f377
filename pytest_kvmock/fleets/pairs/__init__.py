"""Fleets of P/D pairs: a router that picks twice, two legs a request, and what each role did."""
