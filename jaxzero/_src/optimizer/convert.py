"""Arrays of one optimizer step, as they stand on a device, to values of the partitioner and back."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from .._positions import replace_at
from ..comm import collectives, reduce
from ..partition.values import Array, Context, Split, Value
from ..sharding import vma
from ..sharding.layout import Layout
from ..sharding.leaves import Leaf, StateLeaf
from ..sharding.options import Options


def parameters(ctx: Context, arrays: Sequence[Array], leaves: Sequence[Leaf], shares: Sequence[bool]) -> list[Value]:
    """Parameters as shares; the share of a whole parameter keeps the whole one beside it.

    Inside a user's `shard_map` they may be typed as varying (cast for `jax.grad`): then only the
    shares are read, and of a scalar the first device's.
    """
    out: list[Value] = []
    axes = ctx.axes.shard
    for x, leaf, is_share in zip(arrays, leaves, shares, strict=True):
        trace_aval = leaf.trace_aval()
        if is_share:
            out.append(_share(ctx, x, leaf.cut))
        elif trace_aval.dtype != leaf.dtype:
            out.append(jnp.zeros(trace_aval.shape, trace_aval.dtype))
        elif leaf.layout is not None:
            split = Split(vma.cast(collectives.share(x, leaf.layout, ctx.index), axes), leaf.layout)
            split.whole = None if vma.varying(x) & set(ctx.axes.every) else x
            split.local = _first(split.local, ctx.axes.replica)
            out.append(split)
        else:
            out.append(_first(x, ctx.axes.every))
    return out


def gradients(
    ctx: Context,
    options: Options,
    arrays: Sequence[Array],
    leaves: Sequence[Leaf],
    shares: Sequence[bool],
    local: bool,
) -> list[Value]:
    """Gradients as what they are: shares, means of all devices, or this device's own (`local`).

    Local ones are reduced here, as the stage says.
    """
    rows = list(zip(arrays, leaves, shares, strict=True))
    out = [_gradient(ctx, x, leaf, is_share, local) for x, leaf, is_share in rows]
    if not local:
        return out
    varies = lambda x: set(ctx.axes.every) <= vma.varying(x)
    own = [i for i, (x, leaf, is_share) in enumerate(rows) if leaf.trainable and not is_share and varies(x)]
    cut, rest = ([i for i in own if (leaves[i].layout is None) == whole] for whole in (False, True))
    layouts = [leaves[i].cut for i in cut]
    means = reduce.mean_shares([arrays[i] for i in cut], layouts, ctx.axes, options)
    out = replace_at(out, cut, map(Split, means, layouts))
    other_axes = [leaves[i].other_axes for i in rest]
    return replace_at(out, rest, reduce.mean_whole([arrays[i] for i in rest], other_axes, ctx.axes, options))


def _gradient(ctx: Context, x: Array, leaf: Leaf, is_share: bool, local: bool) -> Value:
    """One gradient, not yet reduced where it is this device's own."""
    if not leaf.trainable:
        return jnp.zeros(leaf.shape, leaf.trace_aval().dtype)
    if is_share:
        return _share(ctx, x, leaf.cut)
    return x if leaf.layout is None or local else ctx.split(x, leaf.layout)


def state(ctx: Context, arrays: Sequence[Array], leaves: Sequence[StateLeaf]) -> list[Value]:
    """Optimizer state; its leaves are stored as their layouts say."""
    return [
        _first(x, ctx.axes.every) if leaf.layout is None else _share(ctx, x, leaf.layout)
        for x, leaf in zip(arrays, leaves, strict=True)
    ]


def _share(ctx: Context, x: Array, layout: Layout) -> Split:
    return Split(vma.cast(x, ctx.axes.shard), layout)


def _first(x: Array, axes: Sequence[str]) -> Array:
    """`x` typed as equal over `axes`: the first device's value, where the type says otherwise."""
    over = tuple(a for a in axes if a in vma.varying(x))
    return lax.all_gather(x, over, to="invarying")[0] if over else x
