"""SGLang's HiCache: the tree over device and host, its storage, and its time."""
