"""Collectives on layouts: reduce-scatter, all-gather and all-reduce of many leaves, joined in buckets.

All functions run inside a manual region over the axes of `hops` (outer first). A leaf of at least one bucket
is sent alone and uncopied; smaller ones are joined: `[n, k]` blocks concatenated along axis 1 into
`[n, sum k]`, one collective, cut back per leaf, so row `i` is exactly what device `i` keeps. Buckets
are transport: nothing is ever stored in them.

A leaf that other mesh axes shard is sent alone too, in a nested region that is manual over them: the compiler
would make it whole over these axes at every collective and slice.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..sharding.layout import Layout, OtherAxes
from ..sharding.regions import within
from .hierarchical import Hops, gather, inter_node, intra_node, scatter, scatter_inter_node, scatter_intra_node

Array = jax.Array


#: Leaves in a bucket in any case, and into how many buckets more leaves than that are divided at most.
MEMBERS, MORE = 256, 8
#: Bytes of a bucket that holds everything.
NO_LIMIT = 2**62


def buckets(nbytes: Sequence[int], kinds: Sequence[Any], limit: int | None) -> list[list[int]]:
    """The leaves that are sent together: a bucket is closed as soon as it holds `limit` bytes.

    So there are at most `ceil(small bytes / limit)` buckets per kind, however many leaves there are. Only
    in trees of very many tiny leaves is a bucket closed by their number: each leaf is cut out of a bucket by
    code of its own, the same code for the same place in another bucket. That adds at most `MORE` buckets.

    Args:
      nbytes: Bytes of each leaf on the wire.
      kinds: What must agree inside a bucket (the dtype); `None`: the leaf is sent alone.
      limit: Bytes of a bucket; `None`: every leaf alone.

    Returns:
      Lists of leaf numbers, in order of their first leaf.

    Examples:
      >>> buckets([10, 100, 10, 10], ["f"] * 4, 20)
      [[0, 2], [1], [3]]
    """
    most = max(MEMBERS, -(-len(nbytes) // MORE))
    done: list[list[int]] = []
    open_: dict[Any, tuple[list[int], int]] = {}
    for i, (size, kind) in enumerate(zip(nbytes, kinds, strict=True)):
        if limit is None or size >= limit or kind is None:
            done.append([i])
            continue
        members, total = open_.pop(kind, ([], 0))
        members, total = [*members, i], total + size
        if total >= limit or len(members) >= most:
            done.append(members)
        else:
            open_[kind] = (members, total)
    return sorted(done + [members for members, _ in open_.values()])


# --- one array and its blocks --------------------------------------------------------------------


def stored(x: Array, layout: Layout) -> Array:
    """The logical array in its stored shape: padded with zeros, and ravelled where it is flat."""
    lead = layout.lead
    if layout.kind == "flat":
        x = x.reshape(*layout.shape[:lead], -1)
    pad = layout.stored_shape[lead] - x.shape[lead]
    if not pad:
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, pad if d == lead else 0, 0) for d in range(x.ndim)])


def logical(x: Array, layout: Layout) -> Array:
    """The inverse of `stored`: the padding is cut off."""
    lead = layout.lead
    if layout.kind == "rows":
        size = layout.shape[lead]
        return x if x.shape[lead] == size else lax.slice_in_dim(x, 0, size, axis=lead)
    inner = int(np.prod(layout.shape[lead:], dtype=object))
    return lax.slice_in_dim(x, 0, inner, axis=lead).reshape(layout.shape)


def blocks(x: Array, layout: Layout) -> Array:
    """The logical array as `[n, k]`: row `i` is device `i`'s share, ravelled."""
    x, lead = stored(x, layout), layout.lead
    x = x.reshape(*x.shape[:lead], layout.n, x.shape[lead] // layout.n, *x.shape[lead + 1 :])
    return jnp.moveaxis(x, lead, 0).reshape(layout.n, -1)


def unblocks(x: Array, layout: Layout) -> Array:
    """The inverse of `blocks`."""
    x = jnp.moveaxis(x.reshape(layout.n, *layout.local_shape), 0, layout.lead)
    return logical(x.reshape(layout.stored_shape), layout)


def share(x: Array, layout: Layout, index: Array) -> Array:
    """Device `index`'s share of a whole array; sends nothing.

    The start index is `index` itself, so none overflows 32 bits or is clamped.
    """
    return within(layout.other_axes, functools.partial(_share, layout=layout), x, index)


def _share(x: Array, index: Array, layout: Layout) -> Array:
    x, lead = stored(x, layout), layout.lead
    x = x.reshape(*x.shape[:lead], layout.n, x.shape[lead] // layout.n, *x.shape[lead + 1 :])
    return lax.dynamic_index_in_dim(x, index, axis=lead, keepdims=False)


# --- many arrays ---------------------------------------------------------------------------------


def leaf_scope(name: str) -> str:
    """How a compiled program names what it does for one leaf; `hlo` reads it."""
    return f"leaf({name})"


def _named(layout: Layout) -> contextlib.AbstractContextManager[None]:
    return jax.named_scope(leaf_scope(layout.name)) if layout.name else contextlib.nullcontext()


def bucketed(values: Sequence[Any], layouts: Sequence[Layout], limit: int | None) -> list[list[int]]:
    """The `buckets` of arrays (abstract ones will do) with these layouts; one that other axes shard goes alone."""
    nbytes = [layout.size * x.dtype.itemsize for x, layout in zip(values, layouts, strict=True)]
    kinds = [None if any(layout.other_axes) else x.dtype for x, layout in zip(values, layouts, strict=True)]
    return buckets(nbytes, kinds, limit)


def _joined(
    values: Sequence[Array],
    layouts: Sequence[Layout],
    limit: int | None,
    alone: Callable[..., Array],
    block: Callable[[Array, Layout], Array],
    together: Callable[[Array], Array],
    unblock: Callable[[Array, Layout], Array],
) -> list[Array]:
    """Runs `alone` per large leaf, and `together` on the joined blocks of the small ones."""
    out: list[Any] = [None] * len(values)
    for members in bucketed(values, layouts, limit):
        if len(members) == 1:
            (i,) = members
            with _named(layouts[i]):
                out[i] = within(layouts[i].other_axes, functools.partial(alone, layout=layouts[i]), values[i])
            continue
        parts = [block(values[i], layouts[i]) for i in members]
        sizes = [part.shape[-1] for part in parts]
        whole = together(jnp.concatenate(parts, axis=-1))
        ends = np.cumsum(sizes).tolist()
        for i, size, end in zip(members, sizes, ends, strict=True):
            piece = lax.slice_in_dim(whole, end - size, end, axis=whole.ndim - 1)
            out[i] = unblock(piece, layouts[i])
    return out


def reduce_scatter(
    values: Sequence[Array],
    layouts: Sequence[Layout],
    hops: Hops,
    *,
    bucket_bytes: int | None,
) -> list[Array]:
    """Sums full local arrays over the axes of `hops`; each device keeps its share.

    Sends `(n-1)/n` of the bytes once per large leaf and once per bucket.

    Args:
      values: Arrays of the layouts' logical shapes, different on each device.
      layouts: One per value.
      hops: Manual axes, outer first, each in a collective of its own (`Axes.hops`).
      bucket_bytes: Leaves below this are joined; `None`: none are.

    Returns:
      Arrays of the layouts' local shapes; padding is zero.
    """
    return _joined(
        values,
        layouts,
        bucket_bytes,
        alone=lambda x, layout: scatter(stored(x, layout), hops, layout.lead),
        block=blocks,
        together=lambda x: scatter(x, hops, 0)[0],
        unblock=lambda x, layout: x.reshape(layout.local_shape),
    )


def all_gather(
    shares: Sequence[Array],
    layouts: Sequence[Layout],
    hops: Hops,
    *,
    bucket_bytes: int | None,
) -> list[Array]:
    """The whole logical arrays from the devices' shares, typed as equal on all devices.

    Receives `(n-1)/n` of the bytes, once per large leaf and once per bucket.

    Args:
      shares: Arrays of the layouts' local shapes.
      layouts: One per share.
      hops: Manual axes, outer first, each in a collective of its own (`Axes.hops`).
      bucket_bytes: Leaves below this are joined; `None`: none are.

    Returns:
      Arrays of the layouts' logical shapes, without padding.
    """
    return _joined(
        shares,
        layouts,
        bucket_bytes,
        alone=lambda x, layout: logical(gather(x, hops, layout.lead), layout),
        block=lambda x, layout: x.reshape(1, -1),
        together=lambda x: gather(x, hops, 0),
        unblock=unblocks,
    )


def gather_inter_node(shares: Sequence[Array], layouts: Sequence[Layout], hops: Hops) -> list[Array]:
    """Shares -> node shards, in one collective per hop but the last.

    A node shard is `1/k` of the whole: all that the `k` devices of a node need of other nodes.
    """
    row = lambda x, layout: x.reshape(1, -1)
    return _joined(
        shares,
        layouts,
        NO_LIMIT,
        alone=lambda x, layout: inter_node(row(x, layout), hops, 0),
        block=row,
        together=lambda x: inter_node(x, hops, 0),
        unblock=lambda x, layout: x,
    )


def gather_intra_node(node_shards: Sequence[Array], layouts: Sequence[Layout], hops: Hops) -> list[Array]:
    """The whole logical arrays from node shards, in one collective inside the node."""
    return _joined(
        node_shards,
        layouts,
        NO_LIMIT,
        alone=lambda x, layout: unblocks(intra_node(x, hops, 0), layout),
        block=lambda x, layout: x,
        together=lambda x: intra_node(x, hops, 0),
        unblock=unblocks,
    )


def hops_apart(layout: Layout, hops: Hops) -> bool:
    """Whether the hops of one leaf can be sent one at a time, by the four functions below."""
    return len(hops) > 1 and not any(layout.other_axes)


def gather_outer_hops(share: Array, layout: Layout, hops: Hops) -> Array:
    """All hops of `all_gather` but the last, of one leaf: `1/k` of the whole, for nodes of `k` devices."""
    with _named(layout):
        return inter_node(share, hops, layout.lead)


def gather_last_hop(x: Array, layout: Layout, hops: Hops) -> Array:
    """The whole logical array from a result of `gather_outer_hops`."""
    with _named(layout):
        return logical(intra_node(x, hops, layout.lead), layout)


def scatter_first_hop(x: Array, layout: Layout, hops: Hops) -> Array:
    """The first hop of `reduce_scatter`, of one leaf: the sum inside the node, `1/k` of the whole."""
    with _named(layout):
        return scatter_intra_node(stored(x, layout), hops, layout.lead)


def scatter_outer_hops(x: Array, layout: Layout, hops: Hops) -> Array:
    """The device's share of the sum, from a result of `scatter_first_hop`."""
    with _named(layout):
        return scatter_inter_node(x, hops, layout.lead)


def all_reduce(
    values: Sequence[Array],
    axes: tuple[str, ...],
    *,
    bucket_bytes: int | None,
    reduce: Callable[..., Array] = lax.psum,
    other_axes: Sequence[OtherAxes] | None = None,
) -> list[Array]:
    """Reduces arrays of any shape over `axes`; every device gets the result.

    Sends `2(n-1)/n` of the bytes, once per large leaf and once per bucket.

    Args:
      values: Arrays, different on each device.
      axes: Manual axes.
      bucket_bytes: Arrays below this are joined; `None`: none are.
      reduce: `lax.psum`, `lax.pmax` or `lax.pmin`.
      other_axes: Per array, the other mesh axes that shard it, if any do.

    Returns:
      Arrays of the same shapes, equal on all devices.
    """
    sharded_too = other_axes or [()] * len(values)
    layouts = [Layout(x.shape, 1, "flat", other_axes=b) for x, b in zip(values, sharded_too, strict=True)]
    # XLA on CPU crashes when it folds the sum of a complex constant over devices (seen with jax 0.10.2 and
    # 0.12.0.1), so it sees none. The barrier can go when this compiles, jitted in a `shard_map`:
    # `lax.psum(lax.pcast(jnp.full(3, 1 + 2j), axis, to="varying"), axis)`.
    values = [lax.optimization_barrier(x) if jnp.iscomplexobj(x) else x for x in values]
    return _joined(
        values,
        layouts,
        bucket_bytes,
        alone=lambda x, layout: reduce(x, axes),
        block=lambda x, layout: x.reshape(-1),
        together=lambda x: reduce(x, axes),
        unblock=lambda x, layout: x.reshape(layout.shape),
    )
