"""vLLM's native offload: the chunks in the host, the copies, and their time."""
