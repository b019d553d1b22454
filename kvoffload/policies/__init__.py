"""Which block leaves: the contract, the registry of names, and a twin pair for each policy."""
