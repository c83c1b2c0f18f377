"""Mock engines behind HTTP and ZMQ."""
