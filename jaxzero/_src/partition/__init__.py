"""Evaluate a traced program on shares: any function of full arrays, as it is, over split ones."""
