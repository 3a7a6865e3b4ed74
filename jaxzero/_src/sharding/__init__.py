"""Layouts, axes, leaves, options, and placement of arrays; independent of any traced program."""
