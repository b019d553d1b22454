"""Coverage-guided fuzzing: what bytes are made of, a corpus that the tests run, and the fuzzer."""
