"""What is below the device: links whose bandwidth is shared, and the host memory that evicted blocks travel to."""
