"""Traced programs: tracing, flattening, binding; what differs between versions of JAX."""
