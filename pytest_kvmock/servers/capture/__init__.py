"""Streams of KV events to and from files: captures of tests and of real engines, and checks of them."""
