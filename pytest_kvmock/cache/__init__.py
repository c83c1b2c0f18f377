"""Block managers, and the policies by which they evict."""
