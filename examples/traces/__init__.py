"""Scripts that make traces of what others publish in a form of their own."""
