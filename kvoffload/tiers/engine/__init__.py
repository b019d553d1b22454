"""The machinery of every tier: jobs, threads, staging buffers and breakers."""
