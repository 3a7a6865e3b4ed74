"""Arrays of one optimizer step, as they stand on a device, to values of the partitioner and back."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..comm import collectives, reduce
from ..partition.values import Context, Split
from ..sharding import vma
from ..sharding.leaves import Leaf, StateLeaf
from ..sharding.options import Options


def parameters(ctx: Context, arrays: Sequence[Any], leaves: Sequence[Leaf], shares: Sequence[bool]) -> list[Any]:
    """Parameters as shares. A whole one remembers that the rest of it is there too.

    Inside a user's `shard_map` they may be typed as varying (cast for `jax.grad`): then only the
    shares are read, and of a scalar the first device's.
    """
    out = []
    axes = ctx.axes.shard
    for x, leaf, is_share in zip(arrays, leaves, shares, strict=True):
        trace_aval = leaf.trace_aval()
        if is_share:
            x = _share(ctx, x, leaf)
        elif trace_aval.dtype != leaf.dtype:
            x = jnp.zeros(trace_aval.shape, trace_aval.dtype)
        elif leaf.layout is not None:
            split = Split(vma.cast(collectives.share(x, leaf.layout, ctx.index), axes), leaf.layout)
            split.whole = None if vma.varying(x) & set(ctx.axes.every) else x
            split.local = _first(split.local, ctx.axes.replica)
            x = split
        else:
            x = _first(x, ctx.axes.every)
        out.append(x)
    return out


def gradients(
    ctx: Context,
    options: Options,
    arrays: Sequence[Any],
    leaves: Sequence[Leaf],
    shares: Sequence[bool],
    local: bool,
) -> list[Any]:
    """Gradients as what they are: shares, means of all devices, or this device's own (`local`).

    Local ones are reduced here, as the stage says.
    """
    out: list[Any] = list(arrays)
    for i, (x, leaf, is_share) in enumerate(zip(arrays, leaves, shares, strict=True)):
        if not leaf.trainable:
            out[i] = jnp.zeros(leaf.shape, leaf.trace_aval().dtype)
        elif is_share:
            out[i] = _share(ctx, x, leaf)
        elif leaf.layout is not None and not local:
            out[i] = ctx.split(x, leaf.layout)
    if local:
        own = [leaf.trainable and not s for leaf, s in zip(leaves, shares, strict=True)]
        todo = [i for i, x in enumerate(arrays) if own[i] and set(ctx.axes.every) <= vma.varying(x)]
        cut = [i for i in todo if leaves[i].layout is not None]
        means = reduce.mean_shares([arrays[i] for i in cut], [leaves[i].cut for i in cut], ctx.axes, options)
        for i, x in zip(cut, means, strict=True):
            out[i] = Split(x, leaves[i].cut)
        rest = [i for i in todo if leaves[i].layout is None]
        other_axes = [leaves[i].other_axes for i in rest]
        means = reduce.mean_whole([arrays[i] for i in rest], other_axes, ctx.axes, options)
        for i, x in zip(rest, means, strict=True):
            out[i] = x
    return out


def state(ctx: Context, arrays: Sequence[Any], leaves: Sequence[StateLeaf]) -> list[Any]:
    """Optimizer state; its leaves are stored as their layouts say."""
    return [_share(ctx, x, e) if e.layout else _first(x, ctx.axes.every) for x, e in zip(arrays, leaves, strict=True)]


def _share(ctx: Context, x: Any, leaf: Any) -> Split:
    return Split(vma.cast(x, ctx.axes.shard), leaf.layout)


def _first(x: Any, axes: Sequence[str]) -> Any:
    """`x` typed as equal over `axes`: the first device's value, where the type says otherwise."""
    over = tuple(a for a in axes if a in vma.varying(x))
    return lax.all_gather(x, over, to="invarying")[0] if over else x
