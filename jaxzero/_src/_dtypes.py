"""Promotion of dtypes that JAX does not promote by itself: floats and integers of fewer than 16 and 8 bits."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def promotes(dtype: DTypeLike) -> bool:
    """Whether JAX promotes a dtype beside others; floats of 8 bits or fewer and integers below 8 bits it refuses.

    Examples:
      >>> promotes(jnp.bfloat16), promotes(jnp.float8_e4m3fn), promotes(jnp.int4)
      (True, False, False)
    """
    found = jnp.dtype(dtype)
    if jnp.issubdtype(found, jnp.floating):
        return bool(jnp.finfo(found).bits >= 16)
    return not jnp.issubdtype(found, jnp.integer) or bool(jnp.iinfo(found).bits >= 8)


def promote(a: DTypeLike, b: DTypeLike) -> jnp.dtype:
    """The dtype that holds values of both: as `jnp.promote_types`, where a dtype that does not promote is narrower.

    Two different ones of these have float32 in common.

    Examples:
      >>> promote(jnp.float8_e4m3fn, jnp.bfloat16), promote(jnp.bfloat16, jnp.float32)
      (dtype(bfloat16), dtype('float32'))
    """
    a, b = jnp.dtype(a), jnp.dtype(b)
    if a == b or (promotes(a) and promotes(b)):
        return jnp.promote_types(a, b)
    if promotes(a) or promotes(b):
        return a if promotes(a) else b
    return jnp.dtype(jnp.float32)
