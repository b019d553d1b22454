"""C-level structures of the compiled twins: storage, index, rings with parking, the slot pool."""
