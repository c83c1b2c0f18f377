"""vLLM's block manager, by release."""
