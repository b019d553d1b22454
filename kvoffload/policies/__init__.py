"""Eviction policies: the contract, the registry of names, and a pair of twins per policy."""
