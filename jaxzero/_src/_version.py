"""The version, in a module of its own: the parts that store it are imported by the package that shows it."""

__version__ = "0.1.0"
