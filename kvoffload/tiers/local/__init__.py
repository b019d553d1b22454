"""Tiers on this machine, with an index of their own: memory and the slab."""
