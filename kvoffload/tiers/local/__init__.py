"""Tiers on this machine with their own index: memory and the slab."""
