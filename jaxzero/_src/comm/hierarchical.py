"""One gather and its transpose, hop by hop: across nodes first, then inside the node.

A *hop* is an axis name, or several that are gathered in one collective; a tuple of hops goes outer first.
In the gather each device first fetches the shares of its counterparts in other nodes (one channel per
device of a node, all at once), and only then do the devices of a node exchange what they fetched: `p` shares
of `M` bytes on nodes of `k` devices bring `(p-k)M/p` bytes into a node, where one flat ring brings `(p-1)M/p`.

Order is kept by giving each hop a dimension of its own: outer hops stack in front of inner ones, so the
stacked dimensions read in row-major order are the devices' numbers. Joining node after node without them
would give a permutation of the right shape and norm. The price is the re-ordering: one copy of the whole.
"""

import math
from collections.abc import Sequence

import jax
from jax import lax

from ..sharding.axes import names
from ..sharding.vma import varying

Array = jax.Array
Hops = Sequence[str | tuple[str, ...]]


def gather(x: Array, hops: Hops, axis: int) -> Array:
    """All shares joined along `axis` in order of device number, typed as equal on all devices."""
    return intra_node(inter_node(x, hops, axis), hops, axis)


def inter_node(x: Array, hops: Hops, axis: int) -> Array:
    """All hops but the last: what this device holds of the whole once nothing has to cross nodes any more."""
    for i, hop in enumerate(hops[:-1]):
        x = _all_gather(x, hop, axis + i, tiled=False)
    return x


def intra_node(x: Array, hops: Hops, axis: int) -> Array:
    """The last hop: from the result of `inter_node` to the whole."""
    last = len(hops) - 1
    before, after = x.shape[:axis], x.shape[axis + last + 1 :]
    x = _all_gather(x, hops[-1], axis + last, tiled=True)
    return x.reshape(*before, math.prod(x.shape[axis : axis + len(hops)]), *after)


def _all_gather(x: Array, hop: str | tuple[str, ...], axis: int, tiled: bool) -> Array:
    """One hop of a gather, typed as equal on its devices where the region checks types.

    Autodiff transposes a gather that is typed so to a slice: the cast of its result to a varying one transposes to
    the sum. The region of a loss checks no types and holds no cast, so there the gather itself must transpose to a
    reduce-scatter: else `jax.grad` around a call of the library would give one device's own gradient.
    """
    checked = not varying(x).isdisjoint(names(hop))
    return lax.all_gather(x, hop, axis=axis, tiled=tiled, to="invarying" if checked else "varying")


def scatter(x: Array, hops: Hops, axis: int) -> Array:
    """The sum over devices, cut along `axis`: the transpose of `gather`, inner hop first.

    So the arrays sent between nodes are summed inside each node already, and `1/k` of the size.
    """
    return scatter_inter_node(scatter_intra_node(x, hops, axis), hops, axis)


def scatter_intra_node(x: Array, hops: Hops, axis: int) -> Array:
    """The last hop, which comes first: the sum inside the node of what the device's counterparts keep."""
    outer = [lax.axis_size(hop) for hop in hops[:-1]]
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, *outer, x.shape[axis] // math.prod(outer), *after)
    return lax.psum_scatter(x, hops[-1], scatter_dimension=axis + len(outer), tiled=True)


def scatter_inter_node(x: Array, hops: Hops, axis: int) -> Array:
    """All hops but the last: from the result of `scatter_intra_node` to the device's share."""
    for i in reversed(range(len(hops) - 1)):
        x = lax.psum_scatter(x, hops[i], scatter_dimension=axis + i)
    return x
