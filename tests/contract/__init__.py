"""The contract, sentence by sentence; each test runs on both twins."""
