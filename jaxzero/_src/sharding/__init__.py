"""Layouts, axes, leaves, options, and where arrays stand; knows no program."""
