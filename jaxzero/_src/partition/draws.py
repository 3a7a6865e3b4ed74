"""Random bits drawn share by share, the same that the whole draw has there.

With JAX's default generator (Threefry, "partitionable") the bits of an element are a function of the key
and of the element's row-major number alone. So a device draws its own elements and no others, at no cost
in memory, and any number of devices draws the same array.
"""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from ..jaxpr.compat import aval
from ..sharding.layout import Layout, even_split
from ..sharding.vma import match
from .values import Array, Context, Results, Split, Value

_WORD = 2**32


class ShardedDraws:
    """Which draws are made split, and how: those of the shapes of leaves, and of one layer of a stacked leaf.

    A draw of as many elements in another shape, which initializers reshape, is made in equal parts too.

    Args:
      leaves: The layouts of the leaves.
    """

    def __init__(self, leaves: Iterable[Layout]) -> None:
        self._known: dict[tuple[int, ...], Layout] = {}
        for layout in leaves:
            self._known.setdefault(layout.shape, layout)
            while layout.lead:
                layout = layout.per_layer()
                self._known.setdefault(layout.shape, layout)
        self._sizes = {layout.size: layout.n for layout in self._known.values()}

    def layout(self, shape: tuple[int, ...]) -> Layout | None:
        """How a draw of `shape` is made; `None`: whole."""
        size = math.prod(shape)
        return self._known.get(shape) or (even_split(shape, self._sizes[size]) if size in self._sizes else None)


def bits(ctx: Context, eqn: JaxprEqn, ins: list[Value]) -> Results:
    """`random_bits` as a share, where its shape is one of `sharded_draws`; else `None`."""
    (keys,) = ctx.whole(ins)
    layout = ctx.sharded_draws.layout(aval(eqn.outvars[0]).shape)
    plain = jax.config.jax_threefry_partitionable and str(jax.random.key_impl(keys)) == "threefry2x32"  # type: ignore[attr-defined]
    width = eqn.params["bit_width"]
    if layout is None or not plain or width not in (8, 16, 32, 64) or keys.ndim > layout.lead:
        return None
    if layout.length >= _WORD:
        return None
    high, low = _numbers(layout, keys.ndim, ctx.index)

    def words(key: Array) -> list[Array]:
        return list(threefry2x32_p.bind(*match([key[0], key[1], high, low])))

    for _ in range(keys.ndim):
        words = jax.vmap(words)
    first, second = words(jax.random.key_data(keys))
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        drawn = lax.shift_left(first.astype(dtype), jnp.asarray(32, dtype)) | second.astype(dtype)
    else:
        drawn = (first ^ second).astype(dtype)
    return [Split(drawn, layout)]


def _numbers(layout: Layout, keys: int, index: Array) -> tuple[Array, Array]:
    """High and low words of the numbers of this device's elements, counted inside each key's array.

    In the shape of the share, behind the dimensions of the keys: a reshape afterwards would be a copy. Starts
    come from tables, so that nothing is computed in 32 bits.
    """
    shape, front = layout.local_shape[keys:], layout.lead - keys
    inner = math.prod(layout.shape[layout.lead :])
    length = math.prod(shape[front:])
    blocks = math.prod(shape[:front])
    starts = np.array([[b * inner + i * length for b in range(blocks)] for i in range(layout.n)], np.uint64)
    tables = [jnp.asarray((starts // _WORD).astype(np.uint32)), jnp.asarray((starts % _WORD).astype(np.uint32))]
    here = [lax.dynamic_index_in_dim(x, index, keepdims=False).reshape(shape[:front]) for x in tables]
    high, low = (lax.broadcast_in_dim(x, shape, range(front)) for x in here)
    number = jnp.zeros(shape, np.uint32)
    for axis in range(front, len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]))
        number += lax.broadcasted_iota(np.uint32, shape, axis) * stride
    below = low + number  # wraps around; then it is smaller than what was added
    return high + (below < number).astype(np.uint32), below
