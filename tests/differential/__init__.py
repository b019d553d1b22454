"""Both twins at once: every step is done on each and everything visible is compared."""
