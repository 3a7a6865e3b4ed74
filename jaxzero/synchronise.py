"""Local gradients become the mean over all devices: the one place that divides.

Every function runs inside a manual region. A gradient here is that of the *local* loss, the mean over
this device's examples; the mean over devices is a sum divided once by `n * r`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import collectives
from .layout import Layout
from .mesh import Axes
from .options import Options

Array = jax.Array


def wire_dtype(dtype: Any, reduce_dtype: Any) -> Any:
    """The dtype in which gradients of `dtype` are summed: float32 unless wider, or as asked for."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(dtype)
    if reduce_dtype is not None:
        return jnp.dtype(reduce_dtype)
    return jnp.promote_types(dtype, jnp.float32)


def mean_shares(local: Sequence[Array], layouts: Sequence[Layout], axes: Axes, options: Options) -> list[Array]:
    """The mean over devices of full local gradients; each device keeps its share.

    Stage 1 all-reduces over the shard axis and slices, stages 2 and 3 reduce-scatter; then one
    all-reduce of the share over the replica axis (the second hop).
    """
    sent = [_send(x, axes, options) for x in local]
    if options.stage == 1:
        whole = collectives.all_reduce(sent, axes.shard, bucket_bytes=options.bucket_bytes)
        index = lax.axis_index(axes.shard)
        shares = [collectives.share(x, la, index) for x, la in zip(whole, layouts, strict=True)]
    else:
        shares = collectives.reduce_scatter(sent, layouts, axes.hops, bucket_bytes=options.bucket_bytes)
    if axes.replica:
        shares = collectives.all_reduce(shares, axes.replica, bucket_bytes=options.bucket_bytes)
    return [_receive(x, g.dtype, axes) for x, g in zip(shares, local, strict=True)]


def mean_whole(local: Sequence[Array], axes: Axes, options: Options) -> list[Array]:
    """The mean over devices of local values; every device gets all of it."""
    sent = [_send(x, axes, options) for x in local]
    done = collectives.all_reduce(sent, axes.every, bucket_bytes=options.bucket_bytes)
    return [_receive(x, g.dtype, axes) for x, g in zip(done, local, strict=True)]


def _send(x: Array, axes: Axes, options: Options) -> Array:
    """To the dtype on the wire; a narrow one is divided first, so that the sum cannot overflow."""
    dtype = wire_dtype(x.dtype, options.reduce_dtype)
    return (x / (axes.n * axes.r)).astype(dtype) if _narrow(dtype) else x.astype(dtype)


def _receive(x: Array, dtype: Any, axes: Axes) -> Array:
    """Back from the wire; divided here unless it was before."""
    return (x if _narrow(x.dtype) else x / (axes.n * axes.r)).astype(dtype)


def _narrow(dtype: Any) -> bool:
    return jnp.dtype(dtype).itemsize < 4
