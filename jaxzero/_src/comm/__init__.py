"""Collectives on layouts, flat and in hops, and the reduction of gradients."""
