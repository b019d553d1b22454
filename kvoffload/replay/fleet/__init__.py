"""Engines in simulated time: events, and when the requests of sessions come."""
