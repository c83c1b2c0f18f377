"""P/D pairs of vLLM, by connector: blocks that a prefill engine keeps, and how a decode engine loads them."""
