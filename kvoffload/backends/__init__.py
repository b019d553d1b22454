"""Backends: the contract, and the built-in pool of host memory."""
