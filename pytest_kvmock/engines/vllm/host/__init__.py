"""vLLM's native offload: what it keeps in the host, what it copies, and its time."""
