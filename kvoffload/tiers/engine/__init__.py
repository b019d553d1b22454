"""The parts that all tiers share: jobs, threads, staging buffers and breakers."""
