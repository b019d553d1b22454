"""Integrations that plug the library into engines."""
