"""TensorRT-LLM's cache managers."""
