"""Values of the partitioner to the arrays that are stored."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .values import Context, Split


def at_rest(ctx: Context, values: Sequence[Any]) -> list[jax.Array]:
    """The arrays to store: zeros in the padding, and never of weak type."""
    arrays = [ctx.masked(x) if isinstance(x, Split) else jnp.asarray(x) for x in values]
    return [lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x for x in arrays]
