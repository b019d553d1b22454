"""Managers: the contract, and one manager per kind of pool and policy."""
