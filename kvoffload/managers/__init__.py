"""When a block may be read, written and evicted: the contract and the managers."""
