"""Requests and workers: what stands between a prompt and a block manager."""
