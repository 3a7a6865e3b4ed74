"""Chooses settings for a loss, an optimizer and a machine, from compiled programs."""
